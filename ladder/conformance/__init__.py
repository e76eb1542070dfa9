"""`kvcore conformance`: the contract of L1 and the prefix rule, put to any cache that speaks a small protocol.

peer.py        the protocol; implement it and the entry serves your cache
contract.py    the contract of L1 as a small model that answers every call
moves.py       one call of a run, and how runs are drawn
play.py        one run: the model and the peer side by side
search.py      Hypothesis looks for differences and makes each as small as it can
prefix.py      the prefix rule, told token by token, and the search over it
finding.py     what was found, as text and as JSON
own.py         kvcore itself as a peer
lmcache.py     LMCache as a peer; imports nothing of kvcore
child.py       a peer in another interpreter: the far end; `remote.py` is the near one
"""

from kvcore.ladder.conformance.peer import Peer, PeerCache, PrefixRule

__all__ = ["Peer", "PeerCache", "PrefixRule"]
