"""A set of tools as agents send it: those of several MCP servers, 100 KB, mostly words."""

from __future__ import annotations

from typing import Any

SERVERS = {
    "github": "create_issue update_issue list_issues search_issues add_issue_comment create_branch "
    "create_pull_request merge_pull_request list_commits get_file_contents push_files "
    "create_repository fork_repository search_code search_users get_pull_request_files",
    "files": "read_file read_multiple_files write_file edit_file create_directory list_directory "
    "directory_tree move_file search_files get_file_info list_allowed_directories",
    "browser": "navigate click drag hover type select_option press_key screenshot snapshot "
    "wait_for evaluate handle_dialog file_upload tab_list tab_new tab_close",
    "tracker": "get_ticket create_ticket transition_ticket add_worklog search_tickets "
    "list_projects get_sprint link_tickets",
    "database": "query explain list_schemas list_tables describe_table insert_rows export",
}
WORDS = (
    "Use this only when the user has asked for it, and prefer the narrower tool where there is "
    "one. Results are paged; ask for the next page with the cursor that came with the last one. "
)


def _field(kind: int, name: str) -> dict[str, Any]:
    """As pydantic, zod and their like write them."""
    told = {"title": name.replace("_", " ").title(), "description": f"The {name}. {WORDS}"}
    kinds: list[dict[str, Any]] = [
        {"type": "string", "minLength": 1, "examples": ["main", "a longer example of it"]},
        {"type": "integer", "minimum": 1, "maximum": 100, "default": 30},
        {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None},
        {"type": "array", "items": {"type": "string", "description": "One of them."}},
        {"type": "string", "enum": ["open", "closed", "all"], "default": "open"},
        {"type": "boolean", "default": False},
        {"type": "string", "format": "uri"},
        {"type": "number", "minimum": 0, "maximum": 9007199254740991},
        {"type": "string", "format": "date-time"},
        {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"path": {"type": "string"}, "content": {"type": "string"}},
                "required": ["path", "content"],
                "additionalProperties": False,
            },
        },
        {"type": "object", "additionalProperties": {}, "propertyNames": {"type": "string"}},
        {"$ref": "#/$defs/Scope"},
    ]
    return {**kinds[kind % len(kinds)], **told}


def _parameters(number: int) -> dict[str, Any]:
    names = ["owner", "per_page", "cursor", "labels", "state", "draft", "url", "limit", "since"]
    names += ["files", "metadata", "scope"]
    count = 2 + number * 5 % 7
    fields = {
        name: _field(place, name)
        for place, name in enumerate(names)
        if (place + number) % len(names) < count
    }
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": "object",
        "title": "Arguments",
        "properties": fields,
        "required": list(fields)[:2],
        "additionalProperties": False,
        "$defs": {
            "Scope": {
                "type": "object",
                "title": "Scope",
                "properties": {"depth": {"type": "integer"}, "within": {"$ref": "#/$defs/Scope"}},
            }
        },
    }


def mcp_tools() -> list[dict[str, Any]]:
    names = [f"{server}_{name}" for server, every in SERVERS.items() for name in every.split()]
    return [
        {
            "type": "function",
            "function": {
                "name": name,
                "description": f"Lets you {name.replace('_', ' ')}. {WORDS * 2}",
                "parameters": _parameters(number),
            },
        }
        for number, name in enumerate(names)
    ]
