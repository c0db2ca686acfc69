"""From botocore's errors to the one taxonomy, in one place. Every message names store, key, cause and next step."""

from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectionClosedError,
    ConnectTimeoutError,
    CredentialRetrievalError,
    EndpointConnectionError,
    HTTPClientError,
    IncompleteReadError,
    NoCredentialsError,
    NoRegionError,
    PartialCredentialsError,
    ReadTimeoutError,
    ResponseStreamingError,
    SSLError,
    TokenRetrievalError,
)
from urllib3.exceptions import HTTPError

from trainer_sidecar.store.base import (
    AccessDeniedError,
    AlreadyExistsError,
    BucketMissingError,
    ChecksumRefusedError,
    ClockSkewError,
    NoSpaceError,
    NotFoundError,
    StoreError,
    TruncatedError,
    UnavailableError,
    UnclearError,
    UnsupportedStoreError,
    WrongRegionError,
)

_CREDENTIALS = "check the credentials (Secret, web identity or AWS_* variables) and the bucket policy"
_Cause = tuple[type[StoreError], str]

_BY_CODE: dict[str, _Cause] = {
    "NoSuchKey": (NotFoundError, "does not exist"),
    "NoSuchVersion": (NotFoundError, "does not exist"),
    "NoSuchUpload": (UnclearError, "the upload is gone: it was completed or aborted; HEAD tells"),
    "NoSuchBucket": (BucketMissingError, "the bucket does not exist: create it or correct the store URL"),
    "PreconditionFailed": (AlreadyExistsError, "is occupied"),
    "ConditionalRequestConflict": (AlreadyExistsError, "is being created by another request"),
    "AccessDenied": (AccessDeniedError, f"access denied: {_CREDENTIALS}"),
    "InvalidAccessKeyId": (AccessDeniedError, f"unknown access key: {_CREDENTIALS}"),
    "SignatureDoesNotMatch": (
        AccessDeniedError,
        f"signature refused: {_CREDENTIALS}; stores that dislike newer checksums need "
        "AWS_REQUEST_CHECKSUM_CALCULATION=when_required",
    ),
    "ExpiredToken": (AccessDeniedError, f"the session token has expired: {_CREDENTIALS}"),
    "InvalidToken": (AccessDeniedError, f"the session token is invalid: {_CREDENTIALS}"),
    "AccountProblem": (AccessDeniedError, "the account has a problem: ask the store's provider"),
    "RequestTimeTooSkewed": (ClockSkewError, "this machine's clock is off: synchronise it (NTP)"),
    "RequestExpired": (
        ClockSkewError,
        "the request arrived after it expired: synchronise this machine's clock (NTP)",
    ),
    "BadDigest": (
        ChecksumRefusedError,
        "the store received other bytes than were sent: check the network, try again",
    ),
    "XAmzContentChecksumMismatch": (ChecksumRefusedError, "the store received other bytes than were sent"),
    "XAmzContentSHA256Mismatch": (ChecksumRefusedError, "the store received other bytes than were sent"),
    "InvalidDigest": (ChecksumRefusedError, "the store refused the checksum"),
    "QuotaExceeded": (NoSpaceError, "the store's quota is used up: raise it, or lower the retention"),
    "ServiceQuotaExceeded": (NoSpaceError, "the store's quota is used up: raise it, or lower the retention"),
    "InsufficientCapacity": (NoSpaceError, "the store is full"),
    "XMinioStorageFull": (NoSpaceError, "the store is full"),
    "EntityTooLarge": (NoSpaceError, "the store does not take objects of this size"),
    "PermanentRedirect": (
        WrongRegionError,
        "the bucket is at another endpoint: set store.region or store.endpoint",
    ),
    "TemporaryRedirect": (
        WrongRegionError,
        "the bucket is at another endpoint: set store.region or store.endpoint",
    ),
    "AuthorizationHeaderMalformed": (WrongRegionError, "the bucket is in another region: set store.region"),
    "IllegalLocationConstraintException": (
        WrongRegionError,
        "the bucket is in another region: set store.region",
    ),
    "NotImplemented": (
        UnsupportedStoreError,
        "the store lacks this operation: see the list of known-good stores",
    ),
    "InvalidRange": (TruncatedError, "is shorter than its manifest says: verify the checkpoint"),
}
_BY_STATUS: dict[int, _Cause] = {
    301: _BY_CODE["PermanentRedirect"],
    307: _BY_CODE["TemporaryRedirect"],
    401: _BY_CODE["AccessDenied"],
    403: _BY_CODE["AccessDenied"],
    404: _BY_CODE["NoSuchKey"],
    409: _BY_CODE["ConditionalRequestConflict"],
    412: _BY_CODE["PreconditionFailed"],
    416: _BY_CODE["InvalidRange"],
    501: _BY_CODE["NotImplemented"],
    507: _BY_CODE["QuotaExceeded"],
}
_NO_IDENTITY = (NoCredentialsError, PartialCredentialsError, CredentialRetrievalError, TokenRetrievalError)
_NEVER_SENT = (EndpointConnectionError, ConnectTimeoutError)
_TORN = (IncompleteReadError, ResponseStreamingError, HTTPError)
"""urllib3's own errors escape botocore while a body is read."""


def translate(exc: Exception, *, store: str, key: str, write: bool) -> StoreError:
    """The typed error for `exc`. `write`: the request may have had its effect, so a lost answer is UnclearError."""
    kind, cause = _classify(exc, write)
    return kind(f"{store}: {key or 'bucket'}: {cause}{_origin(exc)}", store=store, key=key)


def _classify(exc: Exception, write: bool) -> _Cause:
    lost: type[StoreError] = UnclearError if write else UnavailableError
    if isinstance(exc, ClientError):
        return _classify_answer(exc, lost)
    if isinstance(exc, _NO_IDENTITY):
        return AccessDeniedError, f"no usable credentials: {_CREDENTIALS}"
    if isinstance(exc, NoRegionError):
        return WrongRegionError, "no region is known: set store.region"
    if isinstance(exc, SSLError):
        return UnavailableError, "TLS failed: set AWS_CA_BUNDLE to the store's CA, or correct the endpoint"
    if isinstance(exc, _NEVER_SENT):
        return UnavailableError, "cannot be reached: check endpoint, DNS, proxy and network policy"
    if isinstance(exc, _TORN):
        return (lost if write else TruncatedError), "the answer broke off"
    if isinstance(exc, (ReadTimeoutError, ConnectionClosedError, HTTPClientError)):
        return lost, "no answer came (time-out or connection reset)"
    if isinstance(exc, BotoCoreError):
        return StoreError, "the request could not be made: check the store's settings"
    return lost, "the connection failed"


def _classify_answer(exc: ClientError, lost: type[StoreError]) -> _Cause:
    code = exc.response.get("Error", {}).get("Code", "")
    status = exc.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    if code in _BY_CODE:
        return _BY_CODE[code]
    if code in (
        "SlowDown",
        "Throttling",
        "ThrottlingException",
        "RequestLimitExceeded",
        "TooManyRequests",
    ) or status in (
        429,
        503,
    ):
        return lost, "the store throttles or is away for a while: it is retried"
    if status in _BY_STATUS:
        return _BY_STATUS[status]
    # 500, 502, 504 and a 200 that carries an error: what became of the request is not known.
    if status >= 500 or status == 200 or code in ("InternalError", "RequestTimeout", "ServiceUnavailable"):
        return lost, "the store failed: it is retried"
    return StoreError, "the store refused the request: look at its log"


def _origin(exc: Exception) -> str:
    if isinstance(exc, ClientError):
        error = exc.response.get("Error", {})
        status = exc.response.get("ResponseMetadata", {}).get("HTTPStatusCode", "?")
        return (
            f" [{exc.operation_name}: {status} {error.get('Code', '')} {error.get('Message', '')}]".replace(
                "  ", " "
            )
        )
    return f" [{type(exc).__name__}: {exc}]"
