"""Authentication: bytes and certificates in, a principal out. It knows no policy and no listener.

`principals` maps a certificate to a principal, `sasl/` runs logins, `credentials` looks up what a login is checked
against, `tls` keeps the contexts of listeners and clients current with their files, `secrets` and
`secret_references` keep secrets out of output and find them.
"""
