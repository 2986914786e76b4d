"""What `quantization_config` states of a checkpoint: a module for each `quant_method`, and what is common to them."""
