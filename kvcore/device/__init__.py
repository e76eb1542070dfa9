"""Between an engine's paged KV and dense chunks: layouts, their planes, and what moves the bytes.

    formats, discover    which layout is this? ambiguous shapes are refused with the hint that decides them
    planes               the address arithmetic of all layouts
    reference            gather and scatter by plain torch: the truth for every other engine, and the fallback
    fingerprint          what the bytes of a chunk mean, for the namespace
    selftest             a byte round trip at registration

Importing any of them needs no torch.
"""
