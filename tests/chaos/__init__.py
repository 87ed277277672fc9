"""`make chaos`: the cluster that a run of `tidelog.testing.chaos` strikes, and the machine that is harmed for it."""
