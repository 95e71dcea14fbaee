"""How fast the SSD tier reads, beside a plain read of the same bytes and beside its own writer."""
