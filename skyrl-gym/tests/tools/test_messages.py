from skyrl_gym.tools.messages import append_content, append_to_system, format_tool_response, join_contents

IMAGE = {"type": "image", "image": "board.png"}
LINE_END = {"type": "text", "text": "\n"}


def text(content: str) -> dict[str, str]:
    return {"type": "text", "text": content}


def test_contents_with_images_become_parts() -> None:
    assert join_contents(["one", "two"]) == "one\ntwo"
    assert join_contents(["one", [IMAGE, text("two")]]) == [text("one"), LINE_END, IMAGE, text("two")]
    assert format_tool_response("4") == "<tool_response>\n4\n</tool_response>"
    response = [text("<tool_response>"), LINE_END, IMAGE, LINE_END, text("</tool_response>")]
    assert format_tool_response([IMAGE]) == response
    assert join_contents([]) == ""


def test_contents_are_appended_to_text_and_to_parts() -> None:
    message = {"role": "user", "content": "Begin."}
    assert append_content(message, "Go.")["content"] == "Begin.\n\nGo."
    assert append_content(message, [IMAGE])["content"] == [text("Begin."), IMAGE]
    assert append_content({"role": "user", "content": [IMAGE]}, "Go.")["content"] == [IMAGE, text("Go.")]
    assert append_content({"role": "user", "content": None}, [IMAGE])["content"] == [IMAGE]
    assert append_to_system([], "Be brief.") == [{"role": "system", "content": "Be brief."}]
