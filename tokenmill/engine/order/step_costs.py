"""What a step costs by its number of tokens, learned from the steps themselves: seconds = fixed + tokens x cost.

A weighted least-squares line through the last hundred or so steps. As long as steps are all alike, nothing counts as
fixed: a caller that limits steps by these costs starts with short ones, and finds out. Long contexts and grammars make
tokens dear, and the line steeper. Knows nothing of shares; fair.py asks it.
"""

from __future__ import annotations

_DECAY = 0.99  # weight of a step in the next one
_MAX_SURPRISE = 1.5  # one step that took longer than this times the prediction is the machine's doing; two are not
_DOUBT = 0.05  # weight of the assumption that nothing is fixed, in steps


class StepCosts:
    def __init__(self) -> None:
        self._weight = self._tokens = self._seconds = self._squares = self._products = 0.0  # decaying sums
        self._last = 0.0  # seconds of the last step
        self.fixed = 0.0
        self.token = 0.0

    @property
    def known(self) -> bool:
        return self.token > 0

    def predict(self, num_tokens: float) -> float:
        return self.fixed + self.token * num_tokens

    def record(self, num_tokens: int, seconds: float) -> None:
        if num_tokens <= 0 or seconds <= 0:
            return
        usual, self._last = _MAX_SURPRISE * max(self.predict(num_tokens), self._last), seconds
        if self.known:
            seconds = min(seconds, usual)
        self._weight = _DECAY * self._weight + 1
        self._tokens = _DECAY * self._tokens + num_tokens
        self._seconds = _DECAY * self._seconds + seconds
        self._squares = _DECAY * self._squares + num_tokens * num_tokens
        self._products = _DECAY * self._products + num_tokens * seconds
        weight = self._weight + _DOUBT  # a step of no tokens and no time
        spread = weight * self._squares - self._tokens**2
        mean_cost = self._seconds / self._tokens
        slope = (weight * self._products - self._tokens * self._seconds) / spread
        self.token = min(max(slope, 1e-3 * mean_cost), mean_cost)
        self.fixed = max(0.0, (self._seconds - self.token * self._tokens) / weight)
