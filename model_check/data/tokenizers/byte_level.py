"""How the ByteLevel of `tokenizers` spells bytes."""


def byte_letters() -> list[str]:
    """The letter of each byte: what can be printed as itself, the others from U+0100 on."""
    printed = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printed else next(others)) for byte in range(256)]
