"""Loading an autoencoder, as every command that decodes does, says nothing; a warning that nobody foresaw is heard."""

import os
import subprocess
import sys

from conftest import ROOT

REVISION = 40 * "0"
LOAD = f"""
import warnings
import autoencoder
import sample
from diffusers import AutoencoderKL
vae = dict(block_out_channels=(32,), layers_per_block=1, down_block_types=("DownEncoderBlock2D",), up_block_types=("UpDecoderBlock2D",))
AutoencoderKL(**vae).save_pretrained("models--stabilityai--sd-vae-ft-ema/snapshots/{REVISION}")
autoencoder.load("sd_vae_ema")
warnings.warn("unforeseen", FutureWarning)
"""


def test_libraries_do_not_greet_and_other_warnings_are_heard(tmp_path):
    (tmp_path / "models--stabilityai--sd-vae-ft-ema" / "refs").mkdir(parents=True)
    (tmp_path / "models--stabilityai--sd-vae-ft-ema" / "refs" / "main").write_text(REVISION)
    env = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    ended = subprocess.run([sys.executable, "-c", LOAD], cwd=tmp_path, env=env, capture_output=True, text=True, check=True)
    assert (ended.stdout, ended.stderr) == ("", "<string>:9: FutureWarning: unforeseen\n")
