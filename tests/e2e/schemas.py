"""Schemas for the tests of structured output, all written for this project: some as applications have them, the rest composed at
random of what is offered. For each there are values that satisfy it."""
import json
import random
import string

WORDS = ["alpha", "beta", "caf\u00e9", "\u65e5\u672c", "x", "a\"b", "tab\t", "", "\\", "name with spaces", "\U0001f600"]


def obj(required, optional=None, **more):
    properties = {**required, **(optional or {})}
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False, **more}


STRING, INTEGER, NUMBER, BOOLEAN, NULL = ({"type": t} for t in ("string", "integer", "number", "boolean", "null"))
ADDRESS = obj({"street": STRING, "city": {"type": "string", "minLength": 1}}, {"zip": {"type": "string", "pattern": "^[0-9]{5}$"}})

APPLICATIONS = {
    "person": obj({"name": {"type": "string", "minLength": 1, "maxLength": 40}, "age": {"type": "integer", "minimum": 0, "maximum": 130}}, {"email": {"type": "string", "maxLength": 60}}),
    "invoice": obj({"id": {"type": "string", "pattern": "^INV-[0-9]{6}$"}, "total": {"type": "number", "minimum": 0}, "lines": {
        "type": "array", "minItems": 1, "items": obj({"sku": STRING, "quantity": {"type": "integer", "minimum": 1}, "price": NUMBER})}}, {"paid": BOOLEAN}),
    "address_book": {"type": "array", "items": obj({"name": STRING, "address": {"$ref": "#/$defs/address"}}), "$defs": {"address": ADDRESS}},
    "tree": {"$defs": {"node": obj({"value": INTEGER}, {"children": {"type": "array", "items": {"$ref": "#/$defs/node"}}})}, "$ref": "#/$defs/node"},
    "list": {"$defs": {"cell": {"anyOf": [NULL, obj({"head": STRING, "tail": {"$ref": "#/$defs/cell"}})]}}, "$ref": "#/$defs/cell"},
    "sentiment": obj({"label": {"enum": ["positive", "negative", "neutral"]}, "score": {"type": "number", "minimum": 0, "maximum": 1}}),
    "event": obj({"title": STRING, "day": {"type": "string", "pattern": "^2[0-9]{3}-(0[1-9]|1[0-2])-[0-3][0-9]$"}}, {"attendees": {"type": "array", "items": STRING, "maxItems": 5}}),
    "shape": {"anyOf": [obj({"kind": {"const": "circle"}, "radius": {"type": "number", "exclusiveMinimum": 0}}),
                        obj({"kind": {"const": "box"}, "width": NUMBER, "height": NUMBER})]},
    "config": {"type": "object", "additionalProperties": {"anyOf": [STRING, INTEGER, BOOLEAN]}},
    "limits": obj({"ports": {"type": "array", "items": {"type": "integer", "minimum": 1, "maximum": 65535}, "minItems": 1, "maxItems": 4}}, {"retries": {"type": "integer", "minimum": 0, "maximum": 9}}),
    "point": {"type": "array", "prefixItems": [NUMBER, NUMBER], "items": False, "minItems": 2},
    "matrix": {"type": "array", "items": {"type": "array", "items": INTEGER, "minItems": 2, "maxItems": 2}},
    "nullable": obj({"comment": {"type": ["string", "null"]}, "rating": {"type": ["integer", "null"]}}),
    "ticket": obj({"priority": {"enum": [1, 2, 3]}, "state": {"enum": ["open", "closed", None]}, "tags": {"type": "array", "items": {"enum": ["bug", "doc", "caf\u00e9"]}}}),
    "extended": {"allOf": [{"type": "object", "properties": {"id": INTEGER}, "required": ["id"]}, {"properties": {"note": STRING}}], "type": "object"},
    "translations": {"type": "object", "patternProperties": {"^[a-z]{2}$": STRING}, "additionalProperties": False},
    "version": {"type": "string", "pattern": "^[0-9]+\\.[0-9]+\\.[0-9]+(-[a-z]+)?$"},
    "temperature": {"type": "number", "minimum": -90.5, "maximum": 60.25},
    "expression": {"$defs": {"e": {"anyOf": [INTEGER, obj({"op": {"enum": ["+", "*"]}, "args": {"type": "array", "items": {"$ref": "#/$defs/e"}, "minItems": 2, "maxItems": 3}})]}}, "$ref": "#/$defs/e"},
    "answer": obj({"reasoning": {"type": "string"}, "answer": {"enum": ["A", "B", "C", "D"]}}),
}


def random_schema(rng, depth=0):
    kinds = ["string", "bounded", "integer", "range", "number", "boolean", "null", "enum", "const", "pattern"]
    if depth < 3:
        kinds += ["object", "object", "array", "array", "tuple", "any", "map"] * 2
    kind = rng.choice(kinds)
    if kind in ("string", "integer", "number", "boolean", "null"):
        return {"type": kind}
    if kind == "bounded":
        low = rng.randrange(4)
        return {"type": "string", "minLength": low, "maxLength": low + rng.randrange(6)}
    if kind == "range":
        low = rng.randrange(-500, 500)
        return {"type": "integer", "minimum": low, "maximum": low + rng.randrange(800)}
    if kind == "enum":
        return {"enum": rng.sample(["red", "green", "blue \"x\"", 1, 2, 30, None, True, "\u00e9"], rng.randrange(1, 5))}
    if kind == "const":
        return {"const": rng.choice(["fixed", 7, None, "a\\b"])}
    if kind == "pattern":
        return {"type": "string", "pattern": rng.choice(["^[a-z]{2,4}$", "^(ab|cd)+$", "^[A-Z][a-z]*( [A-Z][a-z]*)?$", "^[0-9]{3}-[0-9]{4}$", "^x?y*z+$"])}
    if kind == "array":
        low = rng.randrange(3)
        return {"type": "array", "items": random_schema(rng, depth + 1), "minItems": low, **({"maxItems": low + rng.randrange(3)} if rng.random() < .5 else {})}
    if kind == "tuple":
        items = [random_schema(rng, depth + 1) for _ in range(rng.randrange(1, 3))]
        return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}
    if kind == "any":
        types = rng.sample([STRING, INTEGER, BOOLEAN, NULL], 2)
        return {"anyOf": [*types, random_schema(rng, depth + 1)]}
    if kind == "map":
        return {"type": "object", "additionalProperties": random_schema(rng, depth + 1)}
    names = rng.sample(["id", "name", "na", "value", "list", "caf\u00e9", "deep", "a b"], rng.randrange(1, 5))
    return {"type": "object", "properties": {n: random_schema(rng, depth + 1) for n in names},
            "required": [n for n in names if rng.random() < .5], "additionalProperties": False}


def corpus(count=320, seed=11):
    rng = random.Random(seed)
    schemas = list(APPLICATIONS.values())
    while len(schemas) < count:
        schemas.append(random_schema(rng))
    return schemas


PATTERNS = {"^[0-9]{5}$": ["01234", "99999"], "^INV-[0-9]{6}$": ["INV-000042"], "^2[0-9]{3}-(0[1-9]|1[0-2])-[0-3][0-9]$": ["2026-11-30"],
            "^[0-9]+\\.[0-9]+\\.[0-9]+(-[a-z]+)?$": ["1.20.3", "0.0.1-rc"], "^[a-z]{2,4}$": ["ab", "wxyz"], "^(ab|cd)+$": ["ab", "cdab"],
            "^[A-Z][a-z]*( [A-Z][a-z]*)?$": ["A", "Ada Love"], "^[0-9]{3}-[0-9]{4}$": ["555-0100"], "^x?y*z+$": ["z", "xyyz"], "^[a-z]{2}$": ["en", "fr"]}


def value(schema, rng, root=None, depth=0):
    """Some value that satisfies the schema."""
    root = schema if root is None else root
    if "$ref" in schema:
        target = root
        for part in schema["$ref"].split("/")[1:]:
            target = target[part]
        return value(target, rng, root, depth + 1)
    if "allOf" in schema:
        merged = {"type": "object", "properties": {}, "required": []}
        for part in schema["allOf"]:
            merged["properties"].update(part.get("properties", {}))
            merged["required"] += part.get("required", [])
        return value(merged, rng, root, depth)
    if "const" in schema:
        return schema["const"]
    if "enum" in schema:
        return rng.choice(schema["enum"])
    if "anyOf" in schema:
        branches = schema["anyOf"] if depth < 6 else schema["anyOf"][:1]
        return value(rng.choice(branches), rng, root, depth + 1)
    kind = schema.get("type")
    if isinstance(kind, list):
        kind = rng.choice(kind)
    if kind == "object":
        if "patternProperties" in schema:
            (pattern, inner), = schema["patternProperties"].items()
            return {k: value(inner, rng, root, depth + 1) for k in rng.sample(PATTERNS[pattern], rng.randrange(3))}
        out = {}
        for name, inner in schema.get("properties", {}).items():
            if name in schema.get("required", []) or (rng.random() < .5 and depth < 6):
                out[name] = value(inner, rng, root, depth + 1)
        if "properties" not in schema:
            for name in rng.sample(WORDS, rng.randrange(3)):
                out[name] = value(schema["additionalProperties"], rng, root, depth + 1)
        return out
    if kind == "array":
        prefix = [value(s, rng, root, depth + 1) for s in schema.get("prefixItems", [])]
        if schema.get("items") is False:
            return prefix
        low = schema.get("minItems", 0)
        high = schema.get("maxItems", low + (2 if depth < 5 else 0))
        return prefix + [value(schema["items"], rng, root, depth + 1) for _ in range(rng.randint(low, max(low, high)) - len(prefix))]
    if kind == "string":
        if "pattern" in schema:
            return rng.choice(PATTERNS[schema["pattern"]])
        low, high = schema.get("minLength", 0), schema.get("maxLength")
        text = rng.choice(WORDS)
        text += "".join(rng.choice(string.ascii_letters) for _ in range(max(0, low - len(text))))
        return text if high is None else text[:high]
    if kind == "integer":
        return rng.randint(schema.get("minimum", -1000), schema.get("maximum", max(1000, schema.get("minimum", 0))))
    if kind == "number":
        low, high = schema.get("minimum", schema.get("exclusiveMinimum", -1000)), schema.get("maximum", 1000)
        return rng.choice([round(rng.uniform(low, high), rng.randrange(1, 4)), int((low + high) // 2 + 1) if high - low > 4 else round(rng.uniform(low, high), 2)])
    if kind == "boolean":
        return rng.random() < .5
    if kind == "null":
        return None
    return rng.choice([1, "x", [], {}])


def texts(schema, rng, count=3):
    """Spellings of values, and the same with a mistake in them."""
    out = []
    for _ in range(count):
        v = value(schema, rng)
        text = rng.choice([json.dumps(v, ensure_ascii=False), json.dumps(v, ensure_ascii=False, separators=(",", ":")), json.dumps(v, ensure_ascii=False, indent=2)])
        out.append(text)
        at = rng.randrange(len(text))
        wrong = rng.choice([text[:at] + text[at + 1:], text[:at] + rng.choice("x0\",:{}[]-.e") + text[at:], text[:at] + rng.choice("y9\"}]") + text[at + 1:]])
        out.append(wrong)
    return out
