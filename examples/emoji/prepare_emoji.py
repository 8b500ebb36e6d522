"""Converts two npm packages of emoji to a zip of class folders for scripts/prepare_latents.py.

    npm pack emoji-datasource-google@16.0.0 emoji-datasource-twitter@16.0.0
    python examples/emoji/prepare_emoji.py emoji-datasource-*-16.0.0.tgz --out data/emoji.zip
    python scripts/prepare_latents.py source=data/emoji.zip resolution=32 autoencoder=identity out=data/emoji

The images are Noto Emoji (Google, Apache-2.0) and Twemoji (Twitter, CC-BY 4.0), 64×64, on white. Credit them wherever
you show them. Classes are the ten categories in the packages' emoji.json. --classes subcategory divides them into 99,
such as heart and face-smiling. --skin-tones adds the five skin tones of people and hands: 3,750 more, very similar
images.
"""

import argparse
import hashlib
import io
import json
import re
import sys
import tarfile
import zipfile
from collections import defaultdict
from pathlib import Path

from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from runtime.command import program
from runtime.files import atomic_write
from runtime.schema import as_path, first_line

MEMBER = re.compile(r"package/(?:emoji\.json|img/(\w+)/64/([\w-]+\.png))")
EVERY = 10  # one of so many emoji in each category is held out


def read_package(
    path: Path, label: str, skin_tones: bool, categories: dict[str, dict[str, list[tuple[str, bytes]]]],
) -> None:
    """Adds a package's PNGs to `categories`: category -> emoji -> (name in the zip, content).

    An emoji's key is its code points without a skin tone. The folder in the zip is the value of `label` in emoji.json.
    Raises ValueError for a file that is not such a package.
    """
    with tarfile.open(path) as package:
        files = {match: package.extractfile(member).read() for member in package
                 if (match := MEMBER.fullmatch(member.name)) and member.isfile()}
    images = {(match[1], match[2]): content for match, content in files.items() if match[2]}
    described = next((content for match, content in files.items() if not match[2]), None)
    if not images or described is None:
        raise ValueError("it has no package/emoji.json or no package/img/<maker>/64/*.png. Use a file that `npm pack "
                         "emoji-datasource-google@16.0.0` writes.")
    for emoji in json.loads(described):
        name = "-".join(re.findall(r"\w+", emoji[label])).lower()
        tones = emoji.get("skin_variations", {}).values() if skin_tones else ()
        for picture in (emoji["image"], *(tone["image"] for tone in tones)):
            for maker in {maker for maker, _ in images}:
                if content := images.get((maker, picture)):
                    pictures = categories[emoji["category"]][Path(emoji["image"]).stem]
                    pictures.append((f"{name}/{maker}-{picture}", on_white(content)))


def on_white(png: bytes) -> bytes:
    picture = Image.open(io.BytesIO(png)).convert("RGBA")
    page = Image.new("RGBA", picture.size, "white")
    page.alpha_composite(picture)
    written = io.BytesIO()
    page.convert("RGB").save(written, "PNG")
    return written.getvalue()


def split(categories: dict[str, dict[str, list]]) -> tuple[list, list]:
    """Holds out every tenth emoji of a category, from all makers and in all tones, unless a kept one looks the same."""
    kept, held_out = [], []
    for emoji in categories.values():
        for place, name in enumerate(sorted(emoji), start=1):
            (kept if place % EVERY else held_out).extend(sorted(emoji[name]))
    seen = {pixel_hash(content) for _, content in kept}
    return kept, [(name, content) for name, content in held_out if pixel_hash(content) not in seen]


def pixel_hash(png: bytes) -> str:
    return hashlib.sha256(Image.open(io.BytesIO(png)).tobytes()).hexdigest()


def write_zip(path: Path, images: list[tuple[str, bytes]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as partial, zipfile.ZipFile(partial, "w") as archive:
        for name, content in images:
            archive.writestr(zipfile.ZipInfo(name), content)  # no time stamp, so that the file is reproducible
    print(f"{path}: {len(images):,} images")


@program
def main(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("packages", type=as_path, nargs="+")
    parser.add_argument("--out", type=as_path, required=True, help="zip to write")
    parser.add_argument("--held-out", type=as_path, help="zip for every tenth emoji of a category, left out of --out")
    parser.add_argument("--classes", choices=("category", "subcategory"), default="category", help="ten, or 99")
    parser.add_argument("--skin-tones", action="store_true")
    args = parser.parse_args()
    for option, path in (("--out", args.out), ("--held-out", args.held_out)):
        if path and path.exists():
            raise ValueError(f"{option} {path} exists already: choose another, or move it away.")
    if args.held_out and args.held_out.resolve() == args.out.resolve():
        raise ValueError(f"--out and --held-out are both {args.out}: choose two files.")
    categories = defaultdict(lambda: defaultdict(list))
    for package in args.packages:
        try:
            read_package(package, args.classes, args.skin_tones, categories)
        except (OSError, ValueError, EOFError, tarfile.TarError) as error:
            raise ValueError(f"{package}: {first_line(error)}") from None
    kept, held_out = split(categories)
    if args.held_out:
        write_zip(args.held_out, held_out)
    else:
        kept = [picture for emoji in categories.values() for pictures in emoji.values() for picture in pictures]
    write_zip(args.out, sorted(kept))


if __name__ == "__main__":
    main()
