"""Configs of quantised checkpoints, and shapes and dtypes of what is stored for one tensor in each format."""

FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
MXFP4 = {"quant_method": "mxfp4"}


def compressed(**weights):
    weights = {"num_bits": 8, "type": "float", "strategy": "channel"} | weights
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }


INT4 = compressed(num_bits=4, type="int", strategy="group", group_size=32)
PACKED = {"a.weight_packed": ((6, 8), "I32"), "a.weight_scale": ((6, 2), "BF16"), "a.weight_shape": ((2,), "I64")}
NVFP4 = {
    "a.weight": ((6, 16), "U8"),
    "a.weight_scale": ((6, 2), "F8_E4M3"),
    "a.weight_scale_2": ((), "F32"),
}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True}
GPTQ_STORED = {
    "a.qweight": ((8, 16), "I32"),
    "a.qzeros": ((2, 2), "I32"),
    "a.scales": ((2, 16), "F16"),
    "a.g_idx": ((64,), "I32"),
}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32}
AWQ_STORED = {"a.qweight": ((64, 2), "I32"), "a.qzeros": ((2, 2), "I32"), "a.scales": ((2, 16), "F16")}
MLX = {"quant_method": "mlx", "group_size": 64, "bits": 4}
MLX_STORED = {"a.weight": ((6, 16), "U32"), "a.scales": ((6, 2), "BF16"), "a.biases": ((6, 2), "BF16")}
MLX_FP4 = MLX | {"group_size": 32, "mode": "mxfp4"}
GEMMA = {"quant_method": "gemma", "num_bits": 4}
GEMMA_STORED = {"a.weight": ((6, 15), "U8"), "a.weight_scale": ((6, 1), "F32")}
MLX_FP4_STORED = {"a.weight": ((6, 16), "U32"), "a.scales": ((6, 4), "U8")}
BNB = {"quant_method": "bitsandbytes", "load_in_8bit": True}
INT8 = {"a.weight": ((6, 8), "I8"), "a.SCB": ((6,), "F32"), "a.weight_format": ((), "U8")}
W8A8 = compressed(type="int", symmetric=False)
W8A8_STORED = {
    "a.weight": ((6, 8), "I8"),
    "a.weight_scale": ((6, 1), "BF16"),
    "a.weight_zero_point": ((6, 1), "I8"),
}
FUSED = {
    "e.up": ((3, 16, 24), "U8"),
    "e.up_weight_scale": ((3, 2, 24), "F8_E4M3"),
    "e.up_weight_scale_2": ((3,), "F32"),
}
BY_MODULE = {"quant_method": "gptq", "bits": 4, "group_size": 32, "dynamic": {"a$": {"bits": 8}, "a": {"bits": 4}}}
AUTO_ROUND = {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq", "bits": 4, "group_size": 32}
AUTO_STORED = {name: facts for name, facts in GPTQ_STORED.items() if name != "a.g_idx"}
SHARDED = FP8 | {"activation_scheme": "dynamic"}
E4M3, EXPERTS = (6, 16), (3, 16, 32)
