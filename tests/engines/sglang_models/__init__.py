"""Models that SGLang loads by SGLANG_EXTERNAL_MODEL_PACKAGE: kinds of KV that no model of its own has on a CPU."""
