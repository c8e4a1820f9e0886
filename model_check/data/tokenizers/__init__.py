"""Text to ids: given, trained and fast tokenizers, proved equal."""
