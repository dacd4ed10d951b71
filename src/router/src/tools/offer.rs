//! What a request says of tools.

use serde_json::value::RawValue;

use super::ToolFormat;
use crate::error::ApiError;
use crate::fields::Fields;

/// Tools whose calls are looked for in the answers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Offer {
    pub(crate) format: ToolFormat,
    /// Names of the functions offered.
    pub(crate) names: Vec<String>,
    /// Only the first call is wanted.
    pub(crate) one_only: bool,
}

#[derive(serde::Deserialize)]
struct Tool {
    function: Option<Function>,
}

#[derive(serde::Deserialize)]
struct Function {
    name: String,
}

/// `tool_choice`, as far as it can be told here.
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

/// The tools that the model is told of: none when the client wants no calls.
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
    /// `None` when no tool is offered.
    pub(crate) fn read(fields: &Fields<'_>, format: ToolFormat) -> Option<Self> {
        let names = names(offered(fields)?);
        Some(Self { format, names, one_only: fields.parallel_tool_calls == Some(false) })
    }
}

/// Checks what does not depend on the answer. A call may only be demanded where calls are found again
/// in the answer, or engines can be held to it.
pub(crate) fn check(
    fields: &Fields<'_>,
    format: Option<ToolFormat>,
    constrains: bool,
) -> Result<(), ApiError> {
    if fields.tools.is_some_and(|tools| !tools.get().starts_with('[')) {
        return Err(ApiError::invalid("tools", "tools is not a list; it is a list of tool objects"));
    }
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
        _ if format.is_none() && !constrains => refuse(
            "tool_choice can be \"auto\" or \"none\" here: this model's calls are not read; set router.tool_parser to its format"
                .to_owned(),
        ),
        _ => Ok(()),
    }
}
