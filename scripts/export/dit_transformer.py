"""diffusers' DiT with the two numbers in which it differs from the code that its weights were trained with."""

from diffusers import DiTTransformer2DModel
from diffusers.configuration_utils import register_to_config


class DiTTransformer(DiTTransformer2DModel):
    """DiTTransformer2DModel as facebookresearch/DiT computes it.

    A noise level is embedded at the frequencies 10000^(-i/128) and not 10000^(-i/127), which no change of weights
    could make up for, and every norm has the epsilon 1e-6. The position embedding is among the weights.
    """

    @register_to_config
    def __init__(
        self,
        num_attention_heads: int,
        attention_head_dim: int,
        in_channels: int,
        out_channels: int,
        num_layers: int,
        sample_size: int,
        patch_size: int,
        num_embeds_ada_norm: int,
    ):
        super().__init__(
            num_attention_heads=num_attention_heads, attention_head_dim=attention_head_dim, in_channels=in_channels,
            out_channels=out_channels, num_layers=num_layers, sample_size=sample_size, patch_size=patch_size,
            num_embeds_ada_norm=num_embeds_ada_norm, norm_eps=1e-6,
        )
        for block in self.transformer_blocks:
            block.norm1.emb.time_proj.downscale_freq_shift = 0
        self.pos_embed.register_buffer("pos_embed", self.pos_embed.pos_embed)  # saved, which diffusers' is not
