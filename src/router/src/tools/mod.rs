//! Tool calls in an answer's text, found again as the model writes them.
//!
//! A reader goes through the text character by character, so the way it is cut into pieces makes no difference. The
//! reader holds back possible calls until their name is known. From then on it hands on their arguments as they arrive.
//! It returns text that turns out to be no call as content.

mod deepseek;
mod draft;
mod fixed;
pub(crate) mod marks;
mod mistral;
mod object;
mod offer;
mod python;
mod reader;
#[cfg(test)]
mod tests;
mod value;

pub(crate) use offer::{Offer, check, is_forced, offered, with_schema};
pub(crate) use reader::Reader;

/// Which calls are looked for in answers to requests that offer tools.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ToolParser {
    /// Those that the chat template speaks of, see [`ToolParser::NAMES`]; none when it speaks of none.
    ///
    /// Looked for in the template's text, first one there counts: `<function=` or `<arg_key>` (formats
    /// that are not read here: none) · `<tool_call>` (hermes) · `[TOOL_CALLS]` (mistral) ·
    /// `<｜tool▁calls▁begin｜>` (deepseek) · `<|python_start|>` or `func_name1(` (pythonic) ·
    /// `<|python_tag|>` or `"parameters": dictionary` (llama3_json). The built-in vocabulary's is hermes.
    #[default]
    Auto,
    /// None: clients get what the model wrote.
    None,
    /// Always this one.
    Format(ToolFormat),
}

/// How a model writes calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ToolFormat {
    /// `<tool_call>{"name": …, "arguments": {…}}</tool_call>`: Hermes, Qwen.
    Hermes,
    /// The answer is `{"name": …, "parameters": {…}}`, or several with `;` between them, perhaps after
    /// `<|python_tag|>`: Llama 3.
    Llama3Json,
    /// `[TOOL_CALLS][{"name": …, "arguments": {…}}, …]`, or `[TOOL_CALLS]name[ARGS]{…}`: Mistral.
    Mistral,
    /// The answer is `[weather(city="Ulm"), now()]`, perhaps after `<|python_start|>`: Llama 3.2 and 4.
    Pythonic,
    /// `<｜tool▁calls▁begin｜>…`: DeepSeek V3, V3.1 and R1.
    DeepSeek,
}

impl ToolParser {
    /// The names of the values in a configuration.
    pub const NAMES: [&str; 7] = ["auto", "none", "hermes", "llama3_json", "mistral", "pythonic", "deepseek"];

    /// The one of that name; the error says which there are.
    pub fn from_name(name: &str) -> Result<Self, String> {
        Ok(match name {
            "auto" => Self::Auto,
            "none" => Self::None,
            "hermes" => Self::Format(ToolFormat::Hermes),
            "llama3_json" => Self::Format(ToolFormat::Llama3Json),
            "mistral" => Self::Format(ToolFormat::Mistral),
            "pythonic" => Self::Format(ToolFormat::Pythonic),
            "deepseek" => Self::Format(ToolFormat::DeepSeek),
            _ => return Err(format!("{name:?} is not a tool parser; use one of {}", Self::NAMES.join(", "))),
        })
    }

    /// The format looked for in answers of a model whose template speaks of `spoken`.
    pub(crate) fn format(self, spoken: Option<ToolFormat>) -> Option<ToolFormat> {
        match self {
            Self::Auto => spoken,
            Self::None => None,
            Self::Format(format) => Some(format),
        }
    }
}

impl ToolFormat {
    /// The format that a chat template speaks of, by the rule of [`ToolParser::Auto`].
    pub(crate) fn detect(template: &str) -> Option<Self> {
        let has = |text: &str| template.contains(text);
        if has("<function=") || has("<arg_key>") {
            None
        } else if has("<tool_call>") {
            Some(Self::Hermes)
        } else if has("[TOOL_CALLS]") {
            Some(Self::Mistral)
        } else if has(deepseek::CALLS_BEGIN) {
            Some(Self::DeepSeek)
        } else if has(PYTHON_START) || has("func_name1(") {
            Some(Self::Pythonic)
        } else if has(PYTHON_TAG) || has("\"parameters\": dictionary") {
            Some(Self::Llama3Json)
        } else {
            None
        }
    }

    /// Where calls begin, wherever it stands.
    fn marks(self) -> &'static [&'static str] {
        match self {
            Self::Hermes => &["<tool_call>"],
            Self::Llama3Json => &[PYTHON_TAG],
            Self::Mistral => &["[TOOL_CALLS]"],
            Self::Pythonic => &[PYTHON_START],
            Self::DeepSeek => &[deepseek::CALLS_BEGIN],
        }
    }

    /// With what an answer begins that is a call without a mark.
    fn opener(self) -> Option<char> {
        match self {
            Self::Llama3Json => Some('{'),
            Self::Pythonic => Some('['),
            _ => None,
        }
    }

    /// Texts that the reader has to see even where they are special tokens, which are not shown.
    pub(crate) fn seen(self) -> &'static [&'static str] {
        match self {
            Self::Hermes => &["<tool_call>", "</tool_call>"],
            Self::Mistral => &["[TOOL_CALLS]", mistral::ARGUMENTS, mistral::CALL_ID],
            Self::DeepSeek => &[
                deepseek::CALLS_BEGIN,
                deepseek::CALLS_END,
                deepseek::CALL_BEGIN,
                deepseek::CALL_END,
                deepseek::SEPARATOR,
            ],
            Self::Llama3Json | Self::Pythonic => self.marks(),
        }
    }

    /// A call's name for itself. Mistral's templates take nine letters and digits only.
    fn call_id(self) -> String {
        match self {
            Self::Mistral => {
                let digit = |_| char::from_digit(rand::random_range(0..36), 36).expect("36 is the radix");
                (0..9).map(digit).collect()
            }
            _ => crate::caller::fresh_id("call_"),
        }
    }
}

const PYTHON_TAG: &str = "<|python_tag|>";
const PYTHON_START: &str = "<|python_start|>";
