"""Small models of many architectures from transformers, for ``experiment=coverage``; nothing is imported here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

VOCABULARY, BATCH, LENGTH, CLASSES, PIXELS, SAMPLES, FRAMES = 99, 4, 24, 5, 64, 1600, 64


@dataclass(frozen=True, slots=True)
class Architecture:
    """One architecture.

    Attributes:
        name: for people, and for ``only=``.
        group: ``language``, ``encoder-decoder``, ``experts``, ``state space``, ``audio`` or ``vision``.
        model: class in transformers.
        inputs: of a step that returns a loss, see `experiments.steps.training.INPUTS`.
        settings: of the configuration.
    """

    name: str
    group: str
    model: str
    inputs: str
    settings: Mapping[str, Any] = field(default_factory=dict)


_HIDDEN = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
_CAUSAL = {**_HIDDEN, "vocab_size": VOCABULARY, "max_position_embeddings": 64, "use_cache": False,
           "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
_GROUPED = {**_CAUSAL, "num_key_value_heads": 2}  # heads of keys and values are fewer than those of queries
_HEADS = {**_GROUPED, "head_dim": 8}
_GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": VOCABULARY, "use_cache": False,
        "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}  # fmt: skip
_MASKED = {**_HIDDEN, "vocab_size": VOCABULARY, "max_position_embeddings": 64, "pad_token_id": 0}
_BART = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
         "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "vocab_size": VOCABULARY,
         "max_position_embeddings": 64, "use_cache": False, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
         "decoder_start_token_id": 1}  # fmt: skip
_T5 = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": VOCABULARY,
       "use_cache": False, "decoder_start_token_id": 0, "pad_token_id": 0}  # fmt: skip
_EXPERTS = {**_HEADS, "moe_intermediate_size": 32, "num_experts_per_tok": 2}
_VIT = {**_HIDDEN, "image_size": PIXELS, "patch_size": 8, "num_labels": CLASSES}
_WAV = {**_HIDDEN, "conv_dim": (16, 16, 16), "conv_stride": (5, 2, 2), "conv_kernel": (10, 3, 3), "num_labels": CLASSES,
        "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2, "num_feat_extract_layers": 3,
        "mask_time_prob": 0.0, "layerdrop": 0.0, "vocab_size": VOCABULARY}  # fmt: skip


def _language() -> list[Architecture]:
    def of(name: str, model: str, settings: Mapping[str, Any], **more: Any) -> Architecture:
        return Architecture(name, "language", model, "text", {**settings, **more})

    return [
        of("gpt2", "GPT2LMHeadModel", _GPT),
        of("gpt_neo", "GPTNeoForCausalLM", _CAUSAL, num_layers=2, num_heads=4,
           attention_types=[[["global", "local"], 1]]),
        of("gpt_neox", "GPTNeoXForCausalLM", _CAUSAL),
        of("gptj", "GPTJForCausalLM", _GPT, rotary_dim=4),
        of("opt", "OPTForCausalLM", _CAUSAL, ffn_dim=64, word_embed_proj_dim=32),
        of("bloom", "BloomForCausalLM", _GPT, hidden_size=32),
        of("mpt", "MptForCausalLM", _CAUSAL, d_model=32, n_heads=4, n_layers=2, max_seq_len=64),
        of("falcon", "FalconForCausalLM", _CAUSAL),
        of("phi", "PhiForCausalLM", _CAUSAL),
        of("phi3", "Phi3ForCausalLM", _GROUPED),
        of("llama", "LlamaForCausalLM", _HEADS),
        of("mistral", "MistralForCausalLM", _HEADS),
        of("qwen2", "Qwen2ForCausalLM", _GROUPED),
        of("qwen3", "Qwen3ForCausalLM", _HEADS),
        of("gemma", "GemmaForCausalLM", _HEADS),
        of("gemma2", "Gemma2ForCausalLM", _HEADS),
        of("gemma3", "Gemma3ForCausalLM", _HEADS),
        of("olmo", "OlmoForCausalLM", _GROUPED),
        of("olmo2", "Olmo2ForCausalLM", _GROUPED),
        of("cohere", "CohereForCausalLM", _GROUPED),
        of("granite", "GraniteForCausalLM", _GROUPED),
        of("stablelm", "StableLmForCausalLM", _GROUPED),
        of("starcoder2", "Starcoder2ForCausalLM", _GROUPED),
        of("smollm3", "SmolLM3ForCausalLM", _GROUPED),
        of("glm4", "Glm4ForCausalLM", _HEADS),
        of("bert", "BertForMaskedLM", _MASKED),
        of("roberta", "RobertaForMaskedLM", _MASKED),
        of("albert", "AlbertForMaskedLM", _MASKED, embedding_size=16),
        of("electra", "ElectraForMaskedLM", _MASKED, embedding_size=32),
        of("distilbert", "DistilBertForMaskedLM", _MASKED, dim=32, n_layers=2, n_heads=4, hidden_dim=64),
        of("mpnet", "MPNetForMaskedLM", _MASKED),
        of("modernbert", "ModernBertForMaskedLM", _MASKED),
        of("convbert", "ConvBertForMaskedLM", _MASKED, embedding_size=32),
        of("xlnet", "XLNetLMHeadModel", {}, vocab_size=VOCABULARY, d_model=32, n_layer=2, n_head=4, d_inner=64),
        of("deberta-v2", "DebertaV2ForMaskedLM", _MASKED),
        # Branches on the labels, and is refused.
        Architecture("deberta-v2 labels", "language", "DebertaV2ForSequenceClassification", "labelled_text", _MASKED),
    ]  # fmt: skip


def _others() -> list[Architecture]:
    state = {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4, "vocab_size": VOCABULARY, "use_cache": False,
             "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
    return [
        Architecture("bart", "encoder-decoder", "BartForConditionalGeneration", "text", _BART),
        Architecture("pegasus", "encoder-decoder", "PegasusForConditionalGeneration", "text", _BART),
        Architecture("marian", "encoder-decoder", "MarianMTModel", "text", {**_BART, "decoder_vocab_size": VOCABULARY}),
        Architecture("t5", "encoder-decoder", "T5ForConditionalGeneration", "text", _T5),
        Architecture("mixtral", "experts", "MixtralForCausalLM", "text", {**_HEADS, "num_local_experts": 4}),
        Architecture("qwen2_moe", "experts", "Qwen2MoeForCausalLM", "text",
                     {**_EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 32}),
        Architecture("qwen3_moe", "experts", "Qwen3MoeForCausalLM", "text", {**_EXPERTS, "num_experts": 4}),
        Architecture("olmoe", "experts", "OlmoeForCausalLM", "text", {**_EXPERTS, "num_experts": 4}),
        Architecture("granitemoe", "experts", "GraniteMoeForCausalLM", "text",
                     {**_GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2}),
        Architecture("mamba", "state space", "MambaForCausalLM", "text", state),
        Architecture("mamba2", "state space", "Mamba2ForCausalLM", "text",
                     {**state, "num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 8}),
        Architecture("falcon_mamba", "state space", "FalconMambaForCausalLM", "text", state),
        Architecture("wav2vec2", "audio", "Wav2Vec2ForSequenceClassification", "wave", _WAV),
        Architecture("hubert", "audio", "HubertForSequenceClassification", "wave", _WAV),
        Architecture("wavlm", "audio", "WavLMForSequenceClassification", "wave", _WAV),
        Architecture("data2vec-audio", "audio", "Data2VecAudioForSequenceClassification", "wave",
                     {**_WAV, "num_conv_pos_embeddings": 2, "conv_pos_kernel_size": 5}),
        Architecture("ast", "audio", "ASTForAudioClassification", "spectrum",
                     {**_HIDDEN, "num_labels": CLASSES, "max_length": 64, "num_mel_bins": 16, "patch_size": 8}),
        Architecture("whisper", "audio", "WhisperForConditionalGeneration", "speech",
                     {**_BART, "num_mel_bins": 16, "max_source_positions": FRAMES // 2, "max_target_positions": 64}),
    ]  # fmt: skip


def _vision() -> list[Architecture]:
    def of(name: str, model: str, settings: Mapping[str, Any], **more: Any) -> Architecture:
        return Architecture(name, "vision", model, "image", {"num_labels": CLASSES, **settings, **more})

    stages = {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 2, 1]}
    swin = {"image_size": PIXELS, "embed_dim": 16, "depths": [1, 1], "num_heads": [2, 4], "window_size": 4}
    return [
        of("vit", "ViTForImageClassification", _VIT),
        of("deit", "DeiTForImageClassification", _VIT),
        of("beit", "BeitForImageClassification", _VIT),
        of("data2vec-vision", "Data2VecVisionForImageClassification", _VIT),
        of("dinov2", "Dinov2ForImageClassification", _VIT),
        of("ijepa", "IJepaForImageClassification", _VIT),
        of("vit_msn", "ViTMSNForImageClassification", _VIT),
        of("swin", "SwinForImageClassification", swin),
        of("swinv2", "Swinv2ForImageClassification", swin),
        of("resnet", "ResNetForImageClassification", stages, embedding_size=8),
        of("regnet", "RegNetForImageClassification", stages, embedding_size=8, groups_width=4),
        of("bit", "BitForImageClassification", stages, embedding_size=8, num_groups=4),
        of("convnext", "ConvNextForImageClassification", stages),
        of("convnextv2", "ConvNextV2ForImageClassification", stages),
        of("poolformer", "PoolFormerForImageClassification", stages),
        of("focalnet", "FocalNetForImageClassification", {"image_size": PIXELS, "embed_dim": 16, "depths": [1, 1],
           "hidden_sizes": [16, 32], "focal_levels": [2, 2], "focal_windows": [3, 3]}),
        of("pvt", "PvtForImageClassification", stages, image_size=PIXELS, num_attention_heads=[1, 2, 4, 8]),
        of("segformer", "SegformerForImageClassification", stages, num_attention_heads=[1, 2, 4, 8]),
        of("mobilenet_v1", "MobileNetV1ForImageClassification", {}, depth_multiplier=0.25),
        of("mobilenet_v2", "MobileNetV2ForImageClassification", {}, depth_multiplier=0.25),
        of("mobilevit", "MobileViTForImageClassification", {}, image_size=PIXELS, hidden_sizes=[16, 24, 32],
           neck_hidden_sizes=[8, 8, 16, 16, 24, 24, 32]),
        of("efficientnet", "EfficientNetForImageClassification", {}, image_size=PIXELS, width_coefficient=0.25,
           depth_coefficient=0.3, hidden_dim=320),
        of("levit", "LevitForImageClassification", {}, image_size=PIXELS, hidden_sizes=[32, 48, 64], depths=[1, 1, 1],
           num_attention_heads=[2, 3, 4], key_dim=[8, 8, 8]),
    ]  # fmt: skip


ARCHITECTURES = {a.name: a for a in (*_language(), *_others(), *_vision())}
