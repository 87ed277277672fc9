"""Users, logins and certificates for tests of security."""
