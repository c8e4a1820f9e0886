"""From text to token batches: sources, tokenizer, the token cache, the loader."""
