import json

import pytest
from pydantic import ValidationError

from twinphase.errors import InvalidRequestError
from twinphase.server.openai_types import ChatCompletionRequest
from twinphase.server.problems import body, invalid_fields

USER = [{"role": "user", "content": "a"}]


def refusal(request):
    with pytest.raises(ValidationError) as invalid:
        ChatCompletionRequest.model_validate(request)
    return invalid_fields([{**error, "loc": ("body", *error["loc"])} for error in invalid.value.errors()])


@pytest.mark.parametrize(
    "request_, param, message",
    [
        ({"messages": USER, "top_p": "x"}, "top_p", "`top_p`: Input should be a valid number."),
        ({"messages": USER, "max_tokens": True}, "max_tokens", "`max_tokens`: Input should be a valid integer."),
        ({"messages": USER, "body": 1}, "body", "The field `body` is not supported. Leave it out."),
        ({"messages": USER, "x" * 999: 1}, "x" * 100, f"The field `{'x' * 100}` is not supported. Leave it out."),
        ({"messages": [{"role": "boss"}]}, "messages", "`messages.0.role`: only this is supported: 'system', "),
        ({"messages": USER, "top_logprobs": 1}, None, "`top_logprobs` needs `logprobs`: true."),
        ([], None, "The body is not a JSON object. Send one, with `Content-Type: application/json`."),
        ({str(i): i for i in range(1000)}, None, "an object has 1000 fields; 128 are allowed."),
    ],
)
def test_what_is_wrong_is_said_with_the_fields_name(request_, param, message):
    found = refusal(request_)
    assert (found["param"], found["type"]) == (param, "invalid_request_error")
    assert found["message"].startswith(message)


def test_only_the_first_few_are_said():
    many = refusal({"messages": USER, **{f"f{i}": 1 for i in range(50)}})
    assert many["message"].count("not supported") == 3


def test_an_error_is_ascii_whatever_it_quotes():
    text = body(InvalidRequestError("It has \ud800 and \x00.", "Take them out."))
    assert json.loads(text.decode("ascii"))["error"]["message"] == "It has \ud800 and \x00. Take them out."
