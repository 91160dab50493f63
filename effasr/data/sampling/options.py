"""Names and options of the batching strategies."""

from dataclasses import dataclass
from typing import Literal, get_args

from effasr.checks import check
from effasr.data.sampling.bucket_table import BucketTable

Strategy = Literal["packed", "random", "bucketed", "sync_bucketed", "sync_bucketed_2d"]
STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)


@dataclass(frozen=True, kw_only=True, slots=True)
class StrategyOptions:
    """Options of the strategies other than ``packed``."""

    # Seconds of a micro-batch, with padding; by default derived from the frame budget
    batch_duration: float | None = None
    batch_size: int | None = None  # Utterances of a micro-batch, instead of ``batch_duration``
    buckets: int = 20  # Number of duration buckets with about equal total durations
    # Buckets and batch sizes of ``sync_bucketed_2d``; by default derived from the budgets
    table: BucketTable | None = None
    # Whether a micro-batch is computed at the length of its longest utterance, which the reported
    # padding then counts
    padded: bool = False

    def check(self, strategy: str) -> None:
        check(
            strategy in STRATEGIES, "strategy", f"be one of {', '.join(STRATEGIES)}", repr(strategy)
        )
        for name in ("batch_duration", "batch_size"):
            value = getattr(self, name)
            if value is not None and strategy == "packed":
                raise ValueError(
                    f"`{name}` must be left out for strategy packed, whose micro-batches "
                    f"`frame_budget` and `token_budget` fill, but is {value}."
                )
            rule = "be greater than 0"
            remedy = "leave it out to derive it from `frame_budget`"
            check(value is None or value > 0, name, rule, value, remedy)
        if self.batch_duration is not None and self.batch_size is not None:
            raise ValueError(
                f"`batch_size` must be left out where `batch_duration` is given, but they are "
                f"{self.batch_size} and {self.batch_duration}."
            )
        rule = "be at least 2"
        remedy = "strategy random is one bucket for all"
        check(self.buckets >= 2, "buckets", rule, self.buckets, remedy)
        if self.padded and strategy == "packed":
            raise ValueError(
                "`padded` must be false for strategy packed, which exists to avoid padding: "
                "choose another `strategy`."
            )
        self._check_table(strategy)

    def _check_table(self, strategy: str) -> None:
        if self.table is not None and strategy != "sync_bucketed_2d":
            raise ValueError(
                "`bucket_batch_sizes` must be left out but for strategy sync_bucketed_2d, and "
                f"`strategy` is {strategy!r}."
            )
        if strategy != "sync_bucketed_2d":
            return
        rule = "be left out for strategy sync_bucketed_2d, whose buckets have a batch size each"
        remedy = "give `batch_duration` or `bucket_batch_sizes`"
        check(self.batch_size is None, "batch_size", rule, self.batch_size, remedy)
        if self.table is not None and self.batch_duration is not None:
            raise ValueError(
                "`batch_duration` must be left out where `bucket_batch_sizes` gives the batch "
                f"sizes, but is {self.batch_duration}."
            )
