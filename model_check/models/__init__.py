"""The LLaMA that is trained: rotary embedding, attention, blocks, construction."""
