"""Where object stores get credentials from, and what to say if there are none or a server refuses them."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from orbax_safetensors.errors import SafetensorsError
from orbax_safetensors.storage.paths import AZURE, GCS, HTTP, S3

if TYPE_CHECKING:
    from obstore.auth.boto3 import Boto3CredentialProvider

# What obstore asks for the role of a machine, if nothing else gives credentials: the metadata services of AWS, Google
# Cloud and Azure, and the one of AWS's containers.
_METADATA = re.compile(
    r"://(?:169\.254\.|[^/\s]+/(?:latest/(?:api/token|meta-data/)|computeMetadata/v1/|metadata/identity/))"
)

# Before profiles come these, as options or as variables that begin with AWS_.
_BEFORE_PROFILES = frozenset({"access_key_id", "secret_access_key", "skip_signature", "web_identity_token_file"})
_PROFILES = ("AWS_PROFILE", "AWS_DEFAULT_PROFILE")
_PROFILE_FILES = {"AWS_SHARED_CREDENTIALS_FILE": "~/.aws/credentials", "AWS_CONFIG_FILE": "~/.aws/config"}

_PUBLIC = 'what is public is read with storage_options={"skip_signature": True}'


def aws_profile(options: Mapping[str, Any]) -> Boto3CredentialProvider | None:
    """Return the credentials of a profile in `~/.aws`, with its region, as boto3 finds them.

    None if `options` or the environment give others, if there is no profile, or if boto3 is not installed. Raises
    `SafetensorsError` if boto3 cannot use the profile.
    """
    settings = {name.lower().removeprefix("aws_"): value for name, value in (os.environ | dict(options)).items()}
    if any(str(settings.get(name, "")).lower() not in ("", "false") for name in _BEFORE_PROFILES):
        return None
    files = (os.environ.get(name, usual) for name, usual in _PROFILE_FILES.items())
    if not any(map(os.environ.get, _PROFILES)) and not any(os.path.exists(os.path.expanduser(file)) for file in files):
        return None
    try:
        import boto3
        from botocore.exceptions import BotoCoreError
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ImportError:
        return None
    try:
        session = boto3.Session()
        if session.get_credentials() is None:
            return None
        provider = Boto3CredentialProvider(session)
    except BotoCoreError as error:
        fault = f"{type(error).__name__}: {error}"
    else:
        if os.environ.get("AWS_REGION"):  # which boto3 does not heed, and obstore would not after the profile's
            provider.config = {}
        return provider
    raise SafetensorsError(f"boto3 cannot use the profile in ~/.aws: {fault[:300]}")


def asks_metadata(error: str) -> bool:
    """Whether a failed request of obstore, whose error this is, asked the machine's metadata service for its role."""
    return bool(_METADATA.search(error.partition("\n")[0]))


def not_found(scheme: str) -> str:
    """Say that there are no credentials for a scheme, and where they were looked for."""
    boto3 = "" if find_spec("boto3") else ", which takes boto3: pip install boto3"
    origins = {
        S3: f"AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, a profile in ~/.aws (AWS_PROFILE{boto3})",
        GCS: "GOOGLE_APPLICATION_CREDENTIALS, a login of gcloud",
        AZURE: "AZURE_STORAGE_ACCOUNT_KEY, AZURE_STORAGE_SAS_KEY, AZURE_STORAGE_CONNECTION_STRING",
    }
    origin = next(origin for schemes, origin in origins.items() if scheme in schemes)
    return f"found no credentials in storage_options, {origin}, or a role of this machine; {_PUBLIC}"


def hint(scheme: str) -> str | None:
    """Say what one can do if a server refuses credentials, or that there are none."""
    if scheme in HTTP:
        return (
            'it takes a header, storage_options={"default_headers": {"Authorization": ...}}, or user:password@ before '
            "the host; a signed URL expires"
        )
    names = {S3: "AWS_ACCESS_KEY_ID or AWS_PROFILE", GCS: "GOOGLE_APPLICATION_CREDENTIALS", AZURE: "AZURE_STORAGE_*"}
    for schemes, variables in names.items():
        if scheme in schemes:
            return f"check the credentials ({variables}, storage_options) and what they allow; {_PUBLIC}"
    return None
