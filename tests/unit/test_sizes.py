import pytest

from radixshmem.sizes import MAX_BYTES, format_size, parse_size


@pytest.mark.parametrize("text", ["64G", "64GiB", "64g", "64Gi", "64gib", " 64G "])
def test_binary_spellings_are_equal(text: str) -> None:
    assert parse_size(text) == 64 * 2**30


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("64GB", 64 * 10**9),
        ("64kb", 64_000),
        ("4096", 4096),
        (4096, 4096),
        ("0", 0),
        ("1.5T", 3 * 2**39),
        ("0.5GB", 5 * 10**8),
        ("0.3G", 322122547),
        ("2K", 2048),
        ("1P", 2**50),
        (str(MAX_BYTES), MAX_BYTES),
    ],
)
def test_sizes(text: str | int, num_bytes: int) -> None:
    assert parse_size(text) == num_bytes


@pytest.mark.parametrize(
    "text",
    [
        "-5",
        "50%",
        "64X",
        "nan",
        "inf",
        "",
        " ",
        "G",
        "1.5",
        "1e9",
        "64 G",
        "64Gb b",
        "64i",
        "64B",
        "1.G",
        ".5G",
        "٣G",
    ],
)
def test_refused_naming_the_flag(text: str) -> None:
    with pytest.raises(ValueError, match="--data-bytes"):
        parse_size(text, "--data-bytes")


@pytest.mark.parametrize("text", ["9223372036854775808", "9000P", "99999999999999999999T"])
def test_overflow_refused(text: str) -> None:
    with pytest.raises(ValueError, match=f"--data-bytes.*{MAX_BYTES}"):
        parse_size(text, "--data-bytes")


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (512, "512 B"), (1024, "1 KiB"), (3 * 2**39, "1.5 TiB"), (64 * 2**30, "64 GiB")],
)
def test_format(num_bytes: int, text: str) -> None:
    assert format_size(num_bytes) == text
