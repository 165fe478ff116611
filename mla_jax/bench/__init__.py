"""Times `mla_decode` on named cases, beside what the machine can do, and beside FlashMLA."""
