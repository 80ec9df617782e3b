"""Images as inputs of vision-language models: placeholder tokens and processed tensors."""
