"""Drafters by name. Add one: a file here and a line in the table; `speculator.py` and `verify.py` serve them all.

The name is what comes before the colon in `--speculate NAME[:ARGUMENT]`.
"""

from tokenmill.registry import Registry

DRAFTERS = Registry(
    "drafter",
    {
        "ngram": "tokenmill.runtime.speculation.ngram:NgramDrafter",
        "suffix": "tokenmill.runtime.speculation.suffix:SuffixDrafter",
        "draft": "tokenmill.runtime.speculation.draft_model:DraftModel",
        "tree": "tokenmill.runtime.speculation.tree_heads:TreeHeads",
        "head": "tokenmill.runtime.speculation.heads:HeadDrafter",
        "mtp": "tokenmill.runtime.speculation.mtp:MtpDrafter",
        "self": "tokenmill.runtime.speculation.self_draft:SelfDraft",
    },
)
