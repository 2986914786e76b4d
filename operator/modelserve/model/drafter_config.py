"""What is wrong with a drafter's config.json, whatever its design, as whoever named it reads it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pydantic import ValidationError

from modelserve.errors import InvalidInput, first_fault


@contextmanager
def faults_of_a_config() -> Iterator[None]:
    """Makes InvalidInput of what reading such a file comes to: a key that is missing, a value that does not fit."""
    try:
        yield
    except KeyError as error:
        raise InvalidInput(f"drafter: config.json lacks {error.args[0]!r}", field=str(error.args[0])) from error
    except ValidationError as error:
        field, message = first_fault(error)
        raise InvalidInput(f"drafter: config.json: {field or 'geometry'}: {message}") from error
    except (TypeError, ValueError, AttributeError, OverflowError, ZeroDivisionError) as error:
        raise InvalidInput(f"drafter: config.json: {error}") from error
