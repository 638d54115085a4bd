"""The options of an HTTP server: keys, host names, the directory of new weights, and the end of open requests."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import attrs
from cyclopts import Group, Parameter
from cyclopts.validators import Number

from scheduler_components import ConfigError
from scheduler_engine.cli.keys import ApiKey, ApiKeyFile, read_api_key
from scheduler_engine.cli.session import DRAIN_TIMEOUT_S, ServerConfig
from scheduler_engine.frontend.access import AccessPolicy


@Parameter(name="*", group=Group("Access", sort_key=5))
@attrs.frozen(kw_only=True)
class AccessOptions:
    """The options of an HTTP server that has no control requests, one field per option."""

    api_key: ApiKey = attrs.field(default=None, repr=False)
    api_key_file: ApiKeyFile = None
    allowed_host: Annotated[
        tuple[str, ...],
        Parameter(
            show_default=False,
            help="Host name by which clients may reach the server, besides localhost and IP addresses; '*' for any."
            " May be repeated.",
        ),
    ] = ()
    drain_timeout: Annotated[
        float, Parameter(validator=Number(gte=0), help="Seconds that open requests may take after SIGTERM.")
    ] = DRAIN_TIMEOUT_S

    def config(self) -> ServerConfig:
        """Return the configuration of the server.

        Raises:
            ConfigError: a key or a directory cannot be used; the error names the option.
        """
        key = read_api_key("api_key", self.api_key, self.api_key_file)
        access = AccessPolicy(allowed_hosts=self.allowed_host, api_key=key)
        return ServerConfig(access=access, drain_timeout_s=self.drain_timeout)


@Parameter(name="*", group=Group("Access", sort_key=5))
@attrs.frozen(kw_only=True)
class ServerOptions(AccessOptions):
    """The options of an engine's HTTP server."""

    admin_api_key: Annotated[
        str | None,
        Parameter(
            env_var="SCHEDULER_COMPONENTS_ADMIN_API_KEY",
            show_default=False,
            help="Key of control requests, such as /flush_cache. Default: they need the API key.",
        ),
    ] = attrs.field(default=None, repr=False)
    admin_api_key_file: Annotated[Path | None, Parameter(help="File with the key of control requests.")] = None
    weights_root: Annotated[
        Path | None,
        Parameter(help="Directory of models for /update_weights_from_disk. Default: the served model's own folder."),
    ] = None

    def config(self) -> ServerConfig:
        """Return the configuration of the server, as ``AccessOptions.config``."""
        root, given = self.weights_root, super().config()
        if root is not None and not root.is_dir():
            raise ConfigError("weights_root", str(root), "is not a directory", "name the directory of the models")
        admin_key = read_api_key("admin_api_key", self.admin_api_key, self.admin_api_key_file)
        return attrs.evolve(
            given,
            access=attrs.evolve(given.access, admin_api_key=admin_key),
            weights_root=None if root is None else root.absolute(),
        )
