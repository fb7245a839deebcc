"""TLS for the bootstrap service: the server's certificate and key, and whom a client believes."""

import ssl
from dataclasses import dataclass

from kvferry.errors import ConfigError, ConfigReason


@dataclass(frozen=True, slots=True)
class ServerTls:
    """Files in PEM form; uvicorn loads them."""

    certificate: str
    """The server's certificate, with the chain that its clients lack."""
    key: str

    def check(self) -> None:
        """Raise ``ConfigError`` when the two cannot be used together."""
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self.certificate, self.key, password=_no_password)
        except (OSError, ssl.SSLError) as error:
            raise _refused(
                f"bootstrap_tls_cert {self.certificate!r} and bootstrap_tls_key {self.key!r} cannot be used: "
                f"{error.strerror or type(error).__name__}"
            ) from error


def client_context(ca: str | None) -> ssl.SSLContext:
    """What a client checks servers against: the authorities of ``ca``, else those of this machine."""
    try:
        return ssl.create_default_context(cafile=ca)
    except (OSError, ssl.SSLError) as error:
        raise _refused(f"bootstrap_ca {ca!r} cannot be used: {error.strerror or type(error).__name__}") from error


def _no_password() -> str:
    return ""  # else OpenSSL asks on the terminal for the password of an encrypted key


def _refused(message: str) -> ConfigError:
    return ConfigError(ConfigReason.INVALID_VALUE, message)
