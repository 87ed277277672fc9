"""What each request does in each state; `test_request_table.py` says how to read it."""

GROUPS = {
    "IDLE": "empty replaced committed aborted timed-out fenced operator-aborted v1-committed v1-aborted v1-timed-out",
    "V1-IDLE": "v1-committed v1-aborted v1-timed-out",
    "ENDING": "committing aborting timing-out fencing v1-committing",
    "OPEN": "ongoing joint rejoined",
    "PREPARED": "prepared taken-over",
    "TIMED-OUT": "timing-out timed-out operator-aborted v1-timed-out",
    "V2-ENDING": "committing aborting timing-out fencing",
}
"""Of states."""

TABLE: dict[str, dict[str, str]] = {
    "init of a new instance": {
        "Empty+": "else",
        "PrepareAbort+": "OPEN PREPARED v1-ongoing",
        "ending": "ENDING",
    },
    "init, keep prepared": {
        "Empty+": "else",
        "ending": "ENDING",
        "PrepareAbort+": "OPEN v1-ongoing",
        "Ongoing+": "PREPARED",
    },
    "init of the owner": {
        "Empty+": "else",
        "PrepareAbort+": "OPEN PREPARED v1-ongoing",
        "ending": "ENDING",
    },
    "init of the owner, repeated": {
        "same": "else",
        "PRODUCER_FENCED": "replaced taken-over fencing fenced",
        "ending": "committing aborting timing-out v1-committing",
        "Empty+": "unknown",
    },
    "init of the owner, keep prepared": {
        "Empty+": "else",
        "ending": "ENDING",
        "PrepareAbort+": "OPEN v1-ongoing",
        "Ongoing+": "PREPARED",
    },
    "init of another producer": {
        "INVALID_PRODUCER_ID_MAPPING": "else",
        "Empty+": "unknown",
    },
    "add": {
        "Ongoing": "else",
        "CONCURRENT_TRANSACTIONS": "ENDING",
        "INVALID_TXN_STATE": "PREPARED v1-ongoing",
        "INVALID_PRODUCER_ID_MAPPING": "unknown",
    },
    "add the same": {
        "Ongoing": "else",
        "CONCURRENT_TRANSACTIONS": "ENDING",
        "INVALID_TXN_STATE": "PREPARED v1-ongoing",
        "same": "ongoing joint",
        "INVALID_PRODUCER_ID_MAPPING": "unknown",
    },
    "add, late": {
        "PRODUCER_FENCED": "else",
        "TRANSACTION_ABORTABLE": "TIMED-OUT",
        "INVALID_PRODUCER_ID_MAPPING": "unknown",
    },
    "add, another producer": {
        "INVALID_PRODUCER_ID_MAPPING": "else",
    },
    "add, epoch to come": {
        "PRODUCER_FENCED": "else",
        "INVALID_PRODUCER_ID_MAPPING": "unknown",
    },
    "add of the member": {
        "INVALID_PRODUCER_ID_MAPPING": "else",
        "PRODUCER_FENCED": "V2-ENDING",
        "INVALID_TXN_STATE": "PREPARED",
        "Ongoing": "joint",
    },
    "add of the member, another epoch": {
        "INVALID_PRODUCER_ID_MAPPING": "else",
        "PRODUCER_FENCED": "PREPARED V2-ENDING joint",
    },
    "add, version 1": {
        "Ongoing": "else",
        "INVALID_TXN_STATE": "OPEN PREPARED",
        "CONCURRENT_TRANSACTIONS": "ENDING",
        "INVALID_PRODUCER_ID_MAPPING": "unknown",
    },
    "add, version 1, late": {
        "PRODUCER_FENCED": "else",
        "INVALID_PRODUCER_ID_MAPPING": "unknown",
    },
    "verify, version 1": {
        "TRANSACTION_ABORTABLE": "else",
        "CONCURRENT_TRANSACTIONS": "ENDING",
        "INVALID_TXN_STATE": "PREPARED ongoing joint",
        "INVALID_PRODUCER_ID_MAPPING": "unknown",
        "same": "v1-ongoing",
    },
    "verify, version 1, another partition": {
        "TRANSACTION_ABORTABLE": "else",
        "CONCURRENT_TRANSACTIONS": "ENDING",
        "INVALID_PRODUCER_ID_MAPPING": "unknown",
    },
    "join": {
        "Ongoing": "else",
        "CONCURRENT_TRANSACTIONS": "ENDING",
        "INVALID_TXN_STATE": "PREPARED v1-ongoing",
        "TRANSACTIONAL_ID_NOT_FOUND": "unknown",
    },
    "prepare": {
        "INVALID_TXN_STATE": "else",
        "CONCURRENT_TRANSACTIONS": "ENDING",
        "Ongoing": "OPEN",
        "same": "PREPARED",
        "INVALID_PRODUCER_ID_MAPPING": "unknown",
    },
    "prepare, late": {
        "PRODUCER_FENCED": "else",
        "TRANSACTION_ABORTABLE": "TIMED-OUT",
        "INVALID_PRODUCER_ID_MAPPING": "unknown",
    },
    "commit": {
        "INVALID_TXN_STATE": "else",
        "PrepareCommit+": "OPEN PREPARED",
        "CONCURRENT_TRANSACTIONS": "ENDING",
        "INVALID_PRODUCER_ID_MAPPING": "unknown",
    },
    "commit, another token": {
        "PrepareCommit+": "else",
        "CONCURRENT_TRANSACTIONS": "ENDING",
        "INVALID_PRODUCER_ID_MAPPING": "unknown",
        "INVALID_TXN_STATE": "v1-ongoing",
    },
    "commit, the stored token": {
        "PrepareCommit+": "else",
        "CONCURRENT_TRANSACTIONS": "aborting timing-out fencing v1-committing",
        "same": "committing committed rejoined",
        "INVALID_PRODUCER_ID_MAPPING": "unknown",
        "INVALID_TXN_STATE": "v1-ongoing",
    },
    "commit, a member": {
        "TRANSACTION_ABORTABLE": "else",
        "CONCURRENT_TRANSACTIONS": "ENDING",
        "PrepareCommit+": "PREPARED joint",
        "INVALID_PRODUCER_ID_MAPPING": "unknown",
        "INVALID_TXN_STATE": "v1-ongoing",
    },
    "commit, no member": {
        "TRANSACTION_ABORTABLE": "else",
        "CONCURRENT_TRANSACTIONS": "ENDING",
        "INVALID_PRODUCER_ID_MAPPING": "unknown",
        "INVALID_TXN_STATE": "v1-ongoing",
    },
    "abort": {
        "Empty+": "else",
        "PrepareAbort+": "OPEN PREPARED",
        "CONCURRENT_TRANSACTIONS": "ENDING",
        "INVALID_PRODUCER_ID_MAPPING": "unknown",
        "INVALID_TXN_STATE": "v1-ongoing",
    },
    "commit, repeated": {
        "INVALID_TXN_STATE": "else",
        "PRODUCER_FENCED": "replaced taken-over fencing fenced",
        "TRANSACTION_ABORTABLE": "TIMED-OUT",
        "same": "committing committed rejoined",
        "INVALID_PRODUCER_ID_MAPPING": "unknown",
    },
    "commit, repeated, the stored token": {
        "INVALID_TXN_STATE": "else",
        "PRODUCER_FENCED": "replaced taken-over fencing fenced",
        "TRANSACTION_ABORTABLE": "TIMED-OUT",
        "same": "committing committed rejoined",
        "INVALID_PRODUCER_ID_MAPPING": "unknown",
    },
    "commit, repeated, another token": {
        "INVALID_TXN_STATE": "else",
        "PRODUCER_FENCED": "replaced taken-over fencing fenced",
        "TRANSACTION_ABORTABLE": "TIMED-OUT",
        "INVALID_PRODUCER_ID_MAPPING": "unknown",
    },
    "abort, repeated": {
        "INVALID_TXN_STATE": "else",
        "same": "TIMED-OUT aborting aborted",
        "PRODUCER_FENCED": "replaced taken-over fencing fenced",
        "INVALID_PRODUCER_ID_MAPPING": "unknown",
    },
    "end of another producer": {
        "INVALID_PRODUCER_ID_MAPPING": "else",
    },
    "end of the member": {
        "INVALID_PRODUCER_ID_MAPPING": "else",
    },
    "commit, version 1": {
        "INVALID_TXN_STATE": "else",
        "CONCURRENT_TRANSACTIONS": "V2-ENDING",
        "same": "v1-committing v1-committed",
        "INVALID_PRODUCER_ID_MAPPING": "unknown",
        "PrepareCommit": "v1-ongoing",
    },
    "abort, version 1": {
        "INVALID_TXN_STATE": "else",
        "CONCURRENT_TRANSACTIONS": "V2-ENDING",
        "INVALID_PRODUCER_ID_MAPPING": "unknown",
        "PrepareAbort": "v1-ongoing",
        "same": "v1-aborted",
    },
    "commit, version 1, repeated": {
        "PRODUCER_FENCED": "else",
        "INVALID_PRODUCER_ID_MAPPING": "unknown",
    },
    "abort, version 1, repeated": {
        "PRODUCER_FENCED": "else",
        "INVALID_PRODUCER_ID_MAPPING": "unknown",
    },
    "abort of an operator": {
        "same": "else",
        "PrepareAbort+": "OPEN PREPARED v1-ongoing",
        "TRANSACTIONAL_ID_NOT_FOUND": "unknown",
    },
    "complete": {
        "same": "else",
        "CompleteAbort": "aborting timing-out fencing",
        "CompleteCommit": "committing v1-committing",
    },
    "complete, another transaction": {
        "same": "else",
    },
    "timeout": {
        "same": "else",
        "PrepareAbort+": "OPEN v1-ongoing",
    },
    "timeout, too early": {
        "same": "else",
    },
    "timeout, another transaction": {
        "same": "else",
    },
    "timeout of a prepared one": {
        "same": "else",
        "PrepareAbort+": "OPEN PREPARED v1-ongoing",
    },
    "forget idle": {
        "same": "else",
        "forgotten": "V1-IDLE empty replaced aborted timed-out fenced operator-aborted",
    },
}
