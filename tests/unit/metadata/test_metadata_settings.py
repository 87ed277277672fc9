"""Quotas, users, ACLs, producer ids and feature levels: stored, found, removed; bad ones refused."""

import base64
import dataclasses
import hashlib
import hmac
import random
from typing import Any
from uuid import UUID

import pytest
from support.metadata.controller import Cluster

from tidelog.metadata.acls import AclBinding, AclFilter, CreateAcls, DeleteAcls, find_acls
from tidelog.metadata.controller import Controller
from tidelog.metadata.decision import Context
from tidelog.metadata.features import FeatureChange, UpdateFeatures
from tidelog.metadata.producer_ids import AllocateProducerIdBlock
from tidelog.metadata.queries import DescribeAcls, DescribeFeatures, DescribeQuotas, DescribeUsers
from tidelog.metadata.quotas import AlterQuotas, QuotaChange
from tidelog.metadata.records import AllocateProducerIds, UnknownRecord
from tidelog.metadata.users import AlterUsers, UserChange, scram_keys
from tidelog.model.errors import ErrorCode, InvalidRequestError, UnsupportedVersionError


class TestQuotas:
    def alter(self, cluster: Cluster, entity: Any, *values: tuple[str, float | None]) -> Any:
        return cluster.ask(AlterQuotas(changes=(QuotaChange(entity=entity, values=values),))).items[0]

    def test_they_are_stored_for_users_clients_both_and_addresses_and_removed(self) -> None:
        cluster = Cluster()
        assert self.alter(cluster, (("user", "u"),), ("producer_byte_rate", 1024.0)).error is None
        assert self.alter(cluster, (("user", None),), ("consumer_byte_rate", 5.0)).error is None
        both = (("user", "u"), ("client-id", "c"))
        assert self.alter(cluster, both, ("request_percentage", 0.5)).error is None
        assert self.alter(cluster, (("ip", "10.0.0.1"),), ("connection_creation_rate", 2.0)).error is None
        rows = cluster.controller.answer(cluster.image, DescribeQuotas()).quotas
        assert ((("client-id", "c"), ("user", "u")), (("request_percentage", 0.5),)) in rows
        assert len(rows) == 4
        assert self.alter(cluster, (("user", "u"),), ("producer_byte_rate", None)).error is None
        assert len(cluster.image.quotas) == 3
        before = cluster.image
        self.alter(cluster, both[::-1], ("request_percentage", 0.5))
        assert cluster.image is before

    @pytest.mark.parametrize(
        ("entity", "values"),
        [
            ((), (("producer_byte_rate", 1.0),)),
            ((("group", "g"),), (("producer_byte_rate", 1.0),)),
            ((("user", ""),), (("producer_byte_rate", 1.0),)),
            ((("user", "x" * 513),), (("producer_byte_rate", 1.0),)),
            ((("user", "a\x00"),), (("producer_byte_rate", 1.0),)),
            ((("user", "a"), ("user", "b")), (("producer_byte_rate", 1.0),)),
            ((("user", "a"), ("ip", "1.1.1.1")), (("connection_creation_rate", 1.0),)),
            ((("user", "a"),), (("connection_creation_rate", 1.0),)),
            ((("ip", "a"),), (("producer_byte_rate", 1.0),)),
            ((("user", "a"),), (("speed", 1.0),)),
            ((("user", "a"),), (("producer_byte_rate", 0.0),)),
            ((("user", "a"),), (("producer_byte_rate", -1.0),)),
            ((("user", "a"),), (("producer_byte_rate", float("nan")),)),
            ((("user", "a"),), (("producer_byte_rate", float("inf")),)),
            ((("user", "a"),), (("producer_byte_rate", 1.0), ("producer_byte_rate", 2.0))),
        ],
        ids=str,
    )
    def test_bad_ones_are_refused(self, entity: Any, values: Any) -> None:
        cluster = Cluster()
        before = cluster.image
        outcome = self.alter(cluster, entity, *values)
        assert (outcome.error, cluster.image) == (ErrorCode.INVALID_REQUEST, before)
        assert outcome.message

    def test_an_entity_twice_is_refused(self) -> None:
        one = QuotaChange(entity=(("user", "a"),), values=(("producer_byte_rate", 1.0),))
        items = Cluster().ask(AlterQuotas(changes=(one, one))).items
        assert [item.error for item in items] == [ErrorCode.INVALID_REQUEST] * 2


class TestUsers:
    def change(self, **more: Any) -> UserChange:
        fields = {
            "user": "alice",
            "mechanism": "SCRAM-SHA-256",
            "salt": b"salt of alice",
            "salted_password": bytes(32),
            "iterations": 4096,
        }
        return UserChange(**{**fields, **more})

    def alter(self, cluster: Cluster, *changes: UserChange) -> list[ErrorCode | None]:
        return [item.error for item in cluster.ask(AlterUsers(changes=changes)).items]

    def test_the_keys_are_those_of_the_rfc(self) -> None:
        """RFC 7677, section 3: user `user`, password `pencil`; the server's signature there checks the server key."""
        salt = base64.b64decode("W22ZaJ0SNY7soEsUEjb6gQ==")
        salted = hashlib.pbkdf2_hmac("sha256", b"pencil", salt, 4096)
        stored, server = scram_keys("SCRAM-SHA-256", salted)
        message = (
            b"n=user,r=rOprNGfwEbeRWgbNEkqO,"
            b"r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0,s=W22ZaJ0SNY7soEsUEjb6gQ==,i=4096,"
            b"c=biws,r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0"
        )
        signature = hmac.new(server, message, "sha256").digest()
        assert base64.b64encode(signature) == b"6rriTRBi23WpRR/wtup+mMhUZUn/dB5nLTJRsjl95G4="
        proof = base64.b64decode("dHzbZapWIk4jUhN+Ute9ytag9zjfMHgsqmmiz7AndVQ=")
        client_key = bytes(a ^ b for a, b in zip(proof, hmac.new(stored, message, "sha256").digest(), strict=True))
        assert hashlib.sha256(client_key).digest() == stored

    def test_they_are_stored_without_the_password_and_removed(self) -> None:
        cluster = Cluster()
        assert self.alter(cluster, self.change()) == [None]
        assert cluster.controller.answer(cluster.image, DescribeUsers()).users == (("alice", "SCRAM-SHA-256", 4096),)
        assert bytes(32) not in dataclasses.astuple(cluster.image.users["alice", "SCRAM-SHA-256"])
        gone = UserChange(user="alice", mechanism="SCRAM-SHA-256")
        assert self.alter(cluster, gone) == [None]
        assert self.alter(cluster, gone) == [ErrorCode.RESOURCE_NOT_FOUND]

    @pytest.mark.parametrize(
        ("wrong", "code"),
        [
            ({"user": ""}, ErrorCode.UNACCEPTABLE_CREDENTIAL),
            ({"user": "x" * 513}, ErrorCode.UNACCEPTABLE_CREDENTIAL),
            ({"user": "a\nb"}, ErrorCode.UNACCEPTABLE_CREDENTIAL),
            ({"mechanism": "PLAIN"}, ErrorCode.UNSUPPORTED_SASL_MECHANISM),
            ({"iterations": 4095}, ErrorCode.UNACCEPTABLE_CREDENTIAL),
            ({"iterations": 16_385}, ErrorCode.UNACCEPTABLE_CREDENTIAL),
            ({"salt": b""}, ErrorCode.UNACCEPTABLE_CREDENTIAL),
            ({"salt": bytes(2000)}, ErrorCode.UNACCEPTABLE_CREDENTIAL),
            ({"salt": bytes(11)}, ErrorCode.UNACCEPTABLE_CREDENTIAL),
            ({"salted_password": bytes(31)}, ErrorCode.UNACCEPTABLE_CREDENTIAL),
            ({"mechanism": "SCRAM-SHA-512"}, ErrorCode.UNACCEPTABLE_CREDENTIAL),
        ],
        ids=str,
    )
    def test_bad_ones_are_refused(self, wrong: dict[str, Any], code: ErrorCode) -> None:
        cluster = Cluster()
        before = cluster.image
        assert self.alter(cluster, self.change(**wrong)) == [code]
        assert cluster.image is before

    def test_a_credential_twice_is_refused(self) -> None:
        assert self.alter(Cluster(), self.change(), self.change()) == [ErrorCode.DUPLICATE_RESOURCE] * 2


def binding(**more: Any) -> AclBinding:
    fields: dict[str, Any] = {
        "resource_type": "topic",
        "resource": "orders",
        "principal": "User:a",
        "operation": "read",
    }
    return AclBinding(**{**fields, **more})


class TestAcls:
    def create(self, cluster: Cluster, *bindings: AclBinding) -> list[ErrorCode | None]:
        return [item.error for item in cluster.ask(CreateAcls(bindings=bindings)).items]

    def test_they_are_stored_once_found_by_filter_and_deleted_by_filter(self) -> None:
        cluster = Cluster()
        all_of_a = (
            binding(),
            binding(resource="ord", pattern_type="prefixed"),
            binding(resource="*"),
            binding(resource="payments"),
        )
        other = binding(principal="User:b", permission="deny", host="10.0.0.1")
        assert self.create(cluster, *all_of_a, other, binding()) == [None] * 6
        assert len(cluster.image.acls) == 5
        before = cluster.image
        assert self.create(cluster, other) == [None]
        assert cluster.image is before

        def found(**fields: Any) -> set[str]:
            return {acl.resource + acl.pattern_type[0] for acl in find_acls(cluster.image, AclFilter(**fields))}

        assert found(principal="User:a") == {"ordersl", "ordp", "*l", "paymentsl"}
        assert found(resource="orders", pattern_type="match") == {"ordersl", "ordp", "*l"}
        assert found(resource="orders") == {"ordersl"}
        assert found(pattern_type="prefixed") == {"ordp"}
        assert found(permission="deny", operation="read", host="10.0.0.1", resource_type="topic") == {"ordersl"}
        assert found(resource_type="group") == set()
        assert len(cluster.controller.answer(cluster.image, DescribeAcls(matching=AclFilter())).bindings) == 5
        filters = (AclFilter(principal="User:a"), AclFilter(), AclFilter(resource_type="x"))
        first, second, third = cluster.ask(DeleteAcls(filters=filters)).filters
        assert (len(first.deleted), second.deleted) == (4, (other,))
        assert third.error is ErrorCode.INVALID_REQUEST
        assert len(cluster.image.acls) == 0

    @pytest.mark.parametrize(
        "wrong",
        [
            {"resource_type": "table"},
            {"resource": ""},
            {"resource": "x" * 513},
            {"resource": "a\x00"},
            {"pattern_type": "match"},
            {"pattern_type": "any"},
            {"principal": "alice"},
            {"principal": ":a"},
            {"principal": "User:"},
            {"principal": "User:" + "x" * 600},
            {"host": ""},
            {"operation": "fly"},
            {"operation": "cluster-action"},
            {"permission": "maybe"},
            {"resource_type": "cluster", "operation": "alter", "resource": "mine"},
        ],
        ids=str,
    )
    def test_bad_ones_are_refused(self, wrong: dict[str, Any]) -> None:
        cluster = Cluster()
        before = cluster.image
        assert self.create(cluster, binding(**wrong)) == [ErrorCode.INVALID_REQUEST]
        assert cluster.image is before

    def test_a_question_with_a_bad_filter_is_refused(self) -> None:
        cluster = Cluster()
        with pytest.raises(InvalidRequestError):
            cluster.controller.answer(cluster.image, DescribeAcls(matching=AclFilter(operation="fly")))


class TestProducerIds:
    def test_blocks_do_not_overlap_and_come_back_from_the_log(self) -> None:
        cluster = Cluster(2)
        epochs = [cluster.image.brokers[b].broker_epoch for b in (0, 1)]
        blocks = [cluster.ask(AllocateProducerIdBlock(broker=b, broker_epoch=epochs[b])) for b in (0, 1, 0)]
        assert [(block.first, block.count) for block in blocks] == [(0, 1000), (1000, 1000), (2000, 1000)]
        stale = AllocateProducerIdBlock(broker=0, broker_epoch=epochs[0] - 1)
        assert cluster.refused(stale).code is ErrorCode.STALE_BROKER_EPOCH
        unknown = AllocateProducerIdBlock(broker=5, broker_epoch=0)
        assert cluster.refused(unknown).code is ErrorCode.BROKER_ID_NOT_REGISTERED

    def test_the_last_id_is_not_passed(self) -> None:
        cluster = Cluster(1)
        cluster.log_records([AllocateProducerIds(broker=0, broker_epoch=0, next_producer_id=(1 << 63) - 1000)])
        request = AllocateProducerIdBlock(broker=0, broker_epoch=cluster.image.brokers[0].broker_epoch)
        assert cluster.refused(request).code is ErrorCode.INVALID_REQUEST


class TestFeatures:
    def cluster(self, *levels: tuple[int, int]) -> Cluster:
        """Brokers that support these levels of metadata.version, under a controller that knows 1 to 3."""
        cluster = Cluster()
        for broker, (low, high) in enumerate(levels):
            cluster.start(broker, features=(("metadata.version", low, high),))
        cluster.controller = Controller("test-cluster", {"metadata.version": (1, 3), "group.version": (0, 1)})
        return cluster

    def update(self, cluster: Cluster, level: int, kind: str = "upgrade", name: str = "metadata.version") -> Any:
        change = FeatureChange(name=name, level=level, kind=kind)
        return cluster.ask(UpdateFeatures(changes=(change,))).items[0]

    def test_a_level_rises_when_every_registered_node_supports_it(self) -> None:
        cluster = self.cluster((1, 2), (1, 3))
        assert self.update(cluster, 2).error is None
        assert cluster.controller.answer(cluster.image, DescribeFeatures()).levels == (("metadata.version", 2),)
        outcome = self.update(cluster, 3)
        assert outcome.error is ErrorCode.FEATURE_UPDATE_FAILED
        assert "broker 0 supports 1 to 2" in outcome.message

    def test_a_fenced_broker_counts_too_and_so_do_the_controllers(self) -> None:
        cluster = self.cluster((1, 3), (1, 1))
        cluster.crash(1)
        assert self.update(cluster, 2).error is ErrorCode.FEATURE_UPDATE_FAILED
        alone = self.cluster((1, 3))
        context = alone.context()
        old = dataclasses.replace(context, controller_features=((7, (("metadata.version", 1, 1),)),))
        change = UpdateFeatures(changes=(FeatureChange(name="metadata.version", level=2),))
        (outcome,) = alone.controller.decide(alone.image, change, old).reply.items
        assert "controller 7 supports 1 to 1" in outcome.message

    def test_a_broker_that_cannot_read_the_present_level_is_not_registered(self) -> None:
        cluster = self.cluster((1, 2))
        self.update(cluster, 2)
        with pytest.raises(UnsupportedVersionError, match=r"supports metadata\.version 1 to 1, the cluster is at 2"):
            cluster.register(5, features=(("metadata.version", 1, 1),))

    def test_a_downgrade_must_be_named_as_one_and_is_safe_only_if_nothing_is_lost(self) -> None:
        cluster = self.cluster((1, 3))
        self.update(cluster, 2)
        assert self.update(cluster, 1).error is ErrorCode.INVALID_REQUEST
        assert self.update(cluster, 3, "safe-downgrade").error is ErrorCode.INVALID_REQUEST
        cluster.log_records([UnknownRecord(type=99, version=0, fields=b"\x80")])
        assert self.update(cluster, 1, "safe-downgrade").error is ErrorCode.FEATURE_UPDATE_FAILED
        assert self.update(cluster, 1, "unsafe-downgrade").error is None
        assert cluster.image.features["metadata.version"] == 1

    @pytest.mark.parametrize(
        ("name", "level", "kind", "code"),
        [
            ("nothing", 1, "upgrade", ErrorCode.FEATURE_UPDATE_FAILED),
            ("", 1, "upgrade", ErrorCode.FEATURE_UPDATE_FAILED),
            ("metadata.version", 4, "upgrade", ErrorCode.FEATURE_UPDATE_FAILED),
            ("metadata.version", 0, "unsafe-downgrade", ErrorCode.FEATURE_UPDATE_FAILED),
            ("metadata.version", -1, "unsafe-downgrade", ErrorCode.FEATURE_UPDATE_FAILED),
            ("metadata.version", 1, "sideways", ErrorCode.INVALID_REQUEST),
            ("group.version", 1, "upgrade", ErrorCode.FEATURE_UPDATE_FAILED),
        ],
    )
    def test_bad_ones_are_refused(self, name: str, level: int, kind: str, code: ErrorCode) -> None:
        cluster = self.cluster((1, 3))
        before = cluster.image
        outcome = self.update(cluster, level, kind, name)
        assert (outcome.error, cluster.image) == (code, before)
        assert outcome.message

    def test_a_feature_twice_is_refused_and_the_present_level_is_no_change(self) -> None:
        cluster = self.cluster((1, 3))
        before = cluster.image
        change = FeatureChange(name="metadata.version", level=1)
        items = cluster.ask(UpdateFeatures(changes=(change, change))).items
        assert [item.error for item in items] == [ErrorCode.INVALID_REQUEST] * 2
        assert self.update(cluster, 1).error is None
        assert cluster.image is before


def test_ids_come_from_the_given_randomness() -> None:
    first, second = (Context(now_ms=0, random=random.Random(5)) for _ in range(2))
    assert first.new_id() == second.new_id()
    assert first.new_id().version == 4
    assert isinstance(first.new_id(), UUID)
