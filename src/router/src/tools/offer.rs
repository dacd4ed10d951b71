//! The fields of a request that concern tools.

use bytes::Bytes;
use serde_json::value::RawValue;
use serde_json::{Map, Value, json};

use super::ToolFormat;
use crate::engine_body::with_field;
use crate::error::ApiError;
use crate::fields::Fields;

/// Tools whose calls are looked for in the answers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Offer {
    /// How the model writes calls, where a grammar does not say it.
    pub(crate) format: Option<ToolFormat>,
    /// The answer is nothing but calls: its engine is held to that.
    pub(crate) forced: Option<ForcedFormat>,
    /// Names of the functions offered.
    pub(crate) names: Vec<String>,
    /// Only the first call is wanted.
    pub(crate) one_only: bool,
}

#[derive(serde::Deserialize)]
struct DescribedTool {
    function: Option<DescribedFunction>,
}

#[derive(serde::Deserialize)]
struct DescribedFunction {
    name: String,
    parameters: Option<Map<String, Value>>,
}

#[derive(serde::Deserialize)]
struct Tool {
    r#type: Option<String>,
    function: Option<Function>,
}

#[derive(serde::Deserialize)]
struct Function {
    name: String,
}

/// The form of answer that the engine is constrained to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum ForcedFormat {
    /// A list of calls, each an object with `name` and `parameters`.
    List,
    /// The arguments of this function.
    Arguments(String),
}

/// The value of `tool_choice`, as far as the router can read it.
#[derive(Debug, PartialEq, Eq)]
enum Choice {
    Auto,
    Refused,
    Required,
    Named(String),
}

impl Choice {
    fn read(fields: &Fields<'_>) -> Option<Self> {
        match fields.tool_choice.map_or("\"auto\"", RawValue::get) {
            "\"auto\"" => Some(Self::Auto),
            "\"none\"" => Some(Self::Refused),
            "\"required\"" => Some(Self::Required),
            other => Some(Self::Named(serde_json::from_str::<Tool>(other).ok()?.function?.name)),
        }
    }
}

/// The tools that the router lists to the model: none when the client wants no calls.
pub(crate) fn offered<'a>(fields: &Fields<'a>) -> Option<&'a RawValue> {
    let refused = fields.tool_choice.is_some_and(|choice| choice.get() == "\"none\"");
    fields.tools.filter(|tools| !refused && !is_empty_list(tools))
}

fn is_empty_list(raw: &RawValue) -> bool {
    raw.get().strip_prefix('[').is_some_and(|rest| rest.trim_start() == "]")
}

/// Names of the functions in a list of tools; what is not one has none.
fn names(tools: &RawValue) -> Vec<String> {
    let tools: Vec<&RawValue> = serde_json::from_str(tools.get()).unwrap_or_default();
    let name = |tool: &RawValue| Some(serde_json::from_str::<Tool>(tool.get()).ok()?.function?.name);
    tools.into_iter().filter_map(name).collect()
}

impl Offer {
    /// Reads the offer of a request. `None` when it offers no tool, or the format of a call is unknown.
    pub(crate) fn read(fields: &Fields<'_>, format: Option<ToolFormat>) -> Option<Self> {
        let names = names(offered(fields)?);
        let forced = forced(fields);
        let told = forced.is_some() || format.is_some();
        let one_only = fields.parallel_tool_calls == Some(false);
        told.then_some(Self { format, forced, names, one_only })
    }

    fn spoken(&self) -> Option<ToolFormat> {
        self.format.filter(|_| self.forced.is_none())
    }

    /// Where calls begin, wherever it stands.
    pub(super) fn marks(&self) -> &'static [&'static str] {
        self.spoken().map_or(&[], ToolFormat::marks)
    }

    /// With what an answer begins that is a call without a mark.
    pub(super) fn opener(&self) -> Option<char> {
        match &self.forced {
            Some(ForcedFormat::List) => Some('['),
            Some(ForcedFormat::Arguments(_)) => None,
            None => self.format?.opener(),
        }
    }

    /// Texts that have to be seen even where they are special tokens.
    pub(crate) fn seen(&self) -> &'static [&'static str] {
        self.spoken().map_or(&[], ToolFormat::seen)
    }

    /// A call's name for itself.
    pub(super) fn call_id(&self) -> String {
        self.format.unwrap_or(ToolFormat::Hermes).call_id()
    }
}

/// Whether the tool choice requires a form of answer.
pub(crate) fn is_forced(fields: &Fields<'_>) -> bool {
    forced(fields).is_some()
}

/// The form of answer that the tool choice requires.
fn forced(fields: &Fields<'_>) -> Option<ForcedFormat> {
    match Choice::read(fields)? {
        Choice::Required => Some(ForcedFormat::List),
        Choice::Named(name) => Some(ForcedFormat::Arguments(name)),
        Choice::Auto | Choice::Refused => None,
    }
}

/// The body with the grammar that the tool choice asks of the engine, as vLLM makes it: of a field that is there twice, the
/// last counts.
pub(crate) fn with_schema(body: Bytes, fields: &Fields<'_>) -> Result<Bytes, ApiError> {
    let (Some(forced), Some(tools)) = (forced(fields), offered(fields)) else { return Ok(body) };
    let wrong = |why: String| ApiError::invalid("tools", format!("tools cannot be read: {why}"));
    let tools: Vec<DescribedTool> =
        serde_json::from_str(tools.get()).map_err(|error| wrong(error.to_string()))?;
    let functions = tools.into_iter().filter_map(|tool| tool.function);
    let (schema, mut shared) = schema_of(functions, &forced, fields.parallel_tool_calls == Some(false))?;
    let mut schema = schema;
    if let Some(object) = schema.as_object_mut().filter(|_| !shared.is_empty()) {
        object.insert("$defs".into(), std::mem::take(&mut shared).into());
    }
    let format = json!({"type": "json_schema", "json_schema": {"name": "tool_calls", "schema": schema, "strict": true}});
    Ok(with_field(&body, &format!("\"response_format\":{format}")))
}

/// The schema of an answer, and the definitions that all functions' parameters refer to.
fn schema_of(
    functions: impl Iterator<Item = DescribedFunction>,
    forced: &ForcedFormat,
    one_only: bool,
) -> Result<(Value, Map<String, Value>), ApiError> {
    let (mut each, mut shared) = (Vec::new(), Map::new());
    for function in functions {
        let mut parameters = function.parameters.unwrap_or_default();
        if let ForcedFormat::Arguments(name) = forced {
            if *name == function.name {
                let parameters = if parameters.is_empty() { any_object() } else { parameters };
                return Ok((parameters.into(), Map::new()));
            }
            continue;
        }
        if let Some(Value::Object(defs)) = parameters.remove("$defs") {
            for (name, def) in defs {
                if shared.get(&name).is_some_and(|known| *known != def) {
                    let text = format!("the definition {name:?} of tools means two things; name them apart");
                    return Err(ApiError::invalid("tools", text));
                }
                shared.insert(name, def);
            }
        }
        let parameters = if parameters.is_empty() { any_object() } else { parameters };
        each.push(json!({"properties": {"name": {"type": "string", "enum": [function.name]}, "parameters": parameters},
            "required": ["name", "parameters"]}));
    }
    let mut list = json!({"type": "array", "minItems": 1, "items": {"type": "object", "anyOf": each}});
    if one_only {
        list["maxItems"] = json!(1);
    }
    Ok((list, shared))
}

fn any_object() -> Map<String, Value> {
    Map::from_iter([("type".to_owned(), json!("object")), ("properties".to_owned(), json!({}))])
}

/// Checks that each tool is a function with a name. As for vLLM, a tool without a type is one.
fn check_tools(tools: &RawValue) -> Result<(), ApiError> {
    let wrong = |message: String| Err(ApiError::invalid("tools", message).code("invalid_value"));
    let Ok(tools) = serde_json::from_str::<Vec<&RawValue>>(tools.get()) else {
        return wrong("tools is not a list; it is a list of tool objects".to_owned());
    };
    for (at, tool) in tools.into_iter().enumerate() {
        let tool = serde_json::from_str::<Tool>(tool.get()).ok();
        let is_function = |tool: &Tool| tool.r#type.as_deref().is_none_or(|kind| kind == "function");
        let function = tool.filter(is_function).and_then(|tool| tool.function);
        if function.is_none_or(|function| function.name.is_empty()) {
            let form = r#"{"type":"function","function":{"name":...}}"#;
            return wrong(format!("tools[{at}] is not a function with a name; send {form}"));
        }
    }
    Ok(())
}

/// Checks what does not depend on the answer. A call may only be demanded where engines can be held to it.
pub(crate) fn check(fields: &Fields<'_>, constrains: bool) -> Result<(), ApiError> {
    fields.tools.map_or(Ok(()), check_tools)?;
    let refuse = |message: String| Err(ApiError::invalid("tool_choice", message).code("unsupported_value"));
    let demand = match Choice::read(fields) {
        Some(Choice::Auto | Choice::Refused) => return Ok(()),
        Some(demand) => demand,
        None => {
            let forms =
                "\"auto\", \"none\", \"required\" or {\"type\":\"function\",\"function\":{\"name\":...}}";
            return refuse(format!("tool_choice cannot be read; it is {forms}"));
        }
    };
    let names = offered(fields).map(names);
    match (demand, names) {
        (_, None) => refuse("tool_choice demands a call, and no tools are offered; send tools".to_owned()),
        (Choice::Named(name), Some(names)) if !names.contains(&name) => {
            refuse(format!("tool_choice names {name:?}, which is not among the tools; send it, or another"))
        }
        _ if !constrains => refuse(
            "tool_choice can be \"auto\" or \"none\" here: the engine behind cannot be held to a call"
                .to_owned(),
        ),
        _ => Ok(()),
    }
}
