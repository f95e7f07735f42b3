"""From a model folder to a quantized one: layer by layer, with text that shows what the numbers are used for."""
