"""Drafters by name. Add one: a file here and a line in the table; `speculator.py` and `verify.py` serve them all.

The name is what comes before the colon in `--speculate NAME[:ARGUMENT]`.
"""

from tokenmill.registry import Registry

DRAFTERS = Registry(
    "drafter",
    {
        "ngram": "tokenmill.runtime.spec.ngram:NgramDrafter",
        "suffix": "tokenmill.runtime.spec.suffix:SuffixDrafter",
        "draft": "tokenmill.runtime.spec.draft_model:DraftModel",
        "tree": "tokenmill.runtime.spec.tree_heads:TreeHeads",
        "head": "tokenmill.runtime.spec.heads:HeadDrafter",
        "self": "tokenmill.runtime.spec.self_draft:SelfDraft",
    },
)
