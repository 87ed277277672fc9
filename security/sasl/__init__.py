"""SASL logins as state machines: frames in, frames and an outcome out. Pure. `exchange` has the contract."""
