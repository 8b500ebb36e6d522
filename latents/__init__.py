"""Latents: the folder format, its reader and writer, images in, other people's forms in."""
