"""The public API `tidelog.v1`: its .proto files, and what protoc makes of them (`make proto`)."""
