"""The controller: an image and a request in, records and a reply out. One table maps requests to decisions. Pure.

    decision = controller.decide(image, request, context)     a change: log `decision.records`, then reply
    reply = controller.answer(image, query)                    a query: changes nothing

A rejection is an exception of the catalogue. A request with `validate_only` is decided as usual and its records are
dropped. The controller knows neither time, network nor log; its caller passes the image (the speculative one for
decisions, the committed one for queries), logs the records and replies once they are committed.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from tidelog.metadata import (
    acls,
    brokers,
    config_changes,
    features,
    lost_replicas,
    partitions,
    producer_ids,
    queries,
    quotas,
    reassignments,
    recovering_replicas,
    topics,
    users,
)
from tidelog.metadata.decision import Context, Decision
from tidelog.metadata.features import KNOWN_FEATURES
from tidelog.metadata.image import ClusterImage

Decide = Callable[[ClusterImage, Any, Context], Decision[Any]]
QueryHandler = Callable[[ClusterImage, Any], Any]

DECISIONS: dict[type[Any], Decide] = {
    brokers.Heartbeat: brokers.heartbeat,
    brokers.Fence: brokers.fence,
    brokers.Unregister: brokers.unregister,
    brokers.Drain: brokers.drain,
    topics.CreateTopics: topics.create_topics,
    topics.DeleteTopics: topics.delete_topics,
    topics.AddPartitions: topics.add_partitions,
    topics.AdvanceLogStart: topics.advance_log_start,
    partitions.AlterPartition: partitions.alter_partition,
    partitions.ElectLeaders: partitions.elect_leaders,
    partitions.BalanceLeaders: partitions.balance_leaders,
    partitions.ElectMissingLeaders: partitions.decide_missing_leaders,
    partitions.AssignDirectories: partitions.assign_directories,
    reassignments.AlterReassignments: reassignments.alter_reassignments,
    reassignments.GrowInternalTopics: reassignments.grow_internal_topics,
    config_changes.AlterConfigs: config_changes.alter_configs,
    quotas.AlterQuotas: quotas.alter_quotas,
    producer_ids.AllocateProducerIdBlock: producer_ids.allocate_producer_ids,
    users.AlterUsers: users.alter_users,
    acls.CreateAcls: acls.create_acls,
    acls.DeleteAcls: acls.delete_acls,
    lost_replicas.ReplicasLost: lost_replicas.report_lost,
    recovering_replicas.ReplicasRecovered: recovering_replicas.report_recovered,
    partitions.ReportLogEnds: partitions.report_log_ends,
}
"""Decisions that depend only on the image; registration and features also depend on this controller."""

QUERIES: dict[type[Any], QueryHandler] = {
    queries.DescribeTopics: queries.describe_topics,
    queries.DescribeBrokers: queries.describe_brokers,
    queries.DescribeConfigs: queries.describe_configs,
    queries.ListReassignments: queries.answer_list_reassignments,
    queries.DescribeAcls: queries.describe_acls,
    queries.DescribeQuotas: queries.describe_quotas,
    queries.DescribeUsers: queries.describe_users,
    queries.DescribeFeatures: queries.describe_features,
    queries.FindTopics: queries.find_topics,
}


@dataclass(frozen=True, slots=True)
class Controller:
    cluster_id: str
    features: dict[str, tuple[int, int]] = field(default_factory=lambda: dict(KNOWN_FEATURES))
    """name -> (lowest, highest) level that this controller supports."""

    def levels(self) -> tuple[tuple[str, int, int], ...]:
        return tuple((name, low, high) for name, (low, high) in sorted(self.features.items()))

    def _table(self, request: object) -> Decide | None:
        if isinstance(request, brokers.Register):
            return partial(brokers.register, cluster_id=self.cluster_id)
        if isinstance(request, features.UpdateFeatures):
            return partial(features.update_features, known=self.features)
        return DECISIONS.get(type(request))

    def decide(self, image: ClusterImage, request: object, context: Context) -> Decision[Any]:
        """Returns the decision; raises the rejection."""
        decide = self._table(request)
        assert decide is not None, f"no decision for {type(request).__name__}"
        decision = decide(image, request, context)
        if getattr(request, "validate_only", False):
            return Decision((), decision.reply)
        return decision

    def answer(self, image: ClusterImage, query: object) -> Any:
        answer = QUERIES.get(type(query))
        assert answer is not None, f"no answer for {type(query).__name__}"
        return answer(image, query)
