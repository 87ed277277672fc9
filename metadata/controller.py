"""The controller: an image and a request in, records and a reply out. One table says who decides what.

    decision = controller.decide(image, request, context)     a change: log `decision.records`, then reply
    reply = controller.answer(image, question)                 a question: changes nothing

A refusal is an exception of the catalogue. With `validate_only` a request is decided as ever and its records are
dropped. Nothing here knows the time, the network or the log; the shell gives the image (the speculative one for
decisions, the committed one for answers), logs the records and replies once they are committed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from tidelog.metadata import access, brokers, describe, losses, partitions, reassignments, recoveries, settings, topics
from tidelog.metadata.decision import Context, Decision
from tidelog.metadata.features import KNOWN_FEATURES
from tidelog.metadata.image import ClusterImage

Decide = Callable[[ClusterImage, Any, Context], Decision[Any]]
Answer = Callable[[ClusterImage, Any], Any]

DECISIONS: dict[type[Any], Decide] = {
    brokers.Heartbeat: brokers.heartbeat,
    brokers.Fence: brokers.fence,
    brokers.Unregister: brokers.unregister,
    brokers.Drain: brokers.drain,
    topics.CreateTopics: topics.create_topics,
    topics.DeleteTopics: topics.delete_topics,
    topics.AddPartitions: topics.add_partitions,
    topics.Trim: topics.trim,
    partitions.AlterPartition: partitions.alter_partition,
    partitions.ElectLeaders: partitions.elect_leaders,
    partitions.BalanceLeaders: partitions.balance_leaders,
    partitions.FindLeaders: partitions.elect_missing,
    partitions.AssignDirectories: partitions.assign_directories,
    reassignments.AlterReassignments: reassignments.alter_reassignments,
    reassignments.GrowInternalTopics: reassignments.grow_internal_topics,
    settings.AlterConfigs: settings.alter_configs,
    settings.AlterQuotas: settings.alter_quotas,
    settings.AllocateProducerIdBlock: settings.allocate_producer_ids,
    access.AlterUsers: access.alter_users,
    access.CreateAcls: access.create_acls,
    access.DeleteAcls: access.delete_acls,
    losses.ReportLost: losses.report_lost,
    recoveries.ReportOpen: recoveries.report_open,
    partitions.ReportLogEnds: partitions.report_log_ends,
}
"""What needs nothing but the image; registration and features also need what this controller is."""

ANSWERS: dict[type[Any], Answer] = {
    describe.DescribeTopics: describe.describe_topics,
    describe.DescribeBrokers: describe.describe_brokers,
    describe.DescribeConfigs: describe.describe_configs,
    describe.ListReassignments: describe.answer_reassignments,
    describe.DescribeAcls: describe.describe_acls,
    describe.DescribeQuotas: describe.describe_quotas,
    describe.DescribeUsers: describe.describe_users,
    describe.DescribeFeatures: describe.describe_features,
    describe.FindTopics: describe.find_topics,
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
        if isinstance(request, settings.UpdateFeatures):
            return partial(settings.update_features, known=self.features)
        return DECISIONS.get(type(request))

    def decide(self, image: ClusterImage, request: object, context: Context) -> Decision[Any]:
        """Changes nothing; raises the refusal."""
        decide = self._table(request)
        assert decide is not None, f"no decision for {type(request).__name__}"
        decision = decide(image, request, context)
        if getattr(request, "validate_only", False):
            return Decision((), decision.reply)
        return decision

    def answer(self, image: ClusterImage, question: object) -> Any:
        answer = ANSWERS.get(type(question))
        assert answer is not None, f"no answer for {type(question).__name__}"
        return answer(image, question)
