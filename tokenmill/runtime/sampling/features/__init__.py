"""Sampling features in the order they apply. Add one: a file here and a line in its table.

Logit features run before temperature, filters after it on candidates sorted by probability; each filter sees the
distribution that the one before it left, renormalized.
"""

from tokenmill.registry import Registry

LOGIT_FEATURES = Registry(
    "logit feature",
    {
        "penalties": "tokenmill.runtime.sampling.features.penalties:Penalties",
        "logit_bias": "tokenmill.runtime.sampling.features.logit_bias:LogitBias",
        "min_tokens": "tokenmill.runtime.sampling.features.min_tokens:MinTokens",
        "allowed_tokens": "tokenmill.runtime.sampling.features.allowed_tokens:AllowedTokens",
        "bad_words": "tokenmill.runtime.sampling.features.bad_words:BadWords",
        "reasoning_budget": "tokenmill.runtime.sampling.features.reasoning_budget:ReasoningBudget",
        "grammar": "tokenmill.runtime.sampling.features.grammar:Grammar",  # after all that could bring a token back
        "typical": "tokenmill.runtime.sampling.features.typical:Typical",
    },
)

FILTERS = Registry(
    "sampling filter",
    {
        "top_k": "tokenmill.runtime.sampling.features.top_k:TopK",
        "top_p": "tokenmill.runtime.sampling.features.top_p:TopP",
        "min_p": "tokenmill.runtime.sampling.features.min_p:MinP",
    },
)
