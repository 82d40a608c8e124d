import pytest
from tests.sampling.byte_vocabulary import make_compiler


@pytest.fixture(scope="module")
def compiler():
    return make_compiler()
