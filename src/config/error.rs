//! Why a configuration cannot be used.

use std::fmt;
use std::net::AddrParseError;
use std::path::PathBuf;

use crate::spans::CollectorUrlError;

/// The fault of a configuration, and the remedy.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("config {}: {why}; give the path of a TOML file", .file.display())]
    Unreadable {
        /// The file.
        file: PathBuf,
        /// The system's words.
        why: String,
    },
    /// The file's content is at fault.
    #[error("config {}: {fault}", .file.display())]
    InFile {
        /// The file.
        file: PathBuf,
        /// The fault.
        fault: Box<ConfigError>,
    },
    /// It has more bytes than any configuration needs.
    #[error("it has more than {0} bytes, the most that a configuration may have")]
    TooLong(usize),
    /// It is no TOML, has an unknown setting, or a value of another kind. A value is never repeated: it may be a secret.
    #[error("{}{message}", before(.position))]
    Syntax {
        /// The position in the file, if it is known.
        position: Option<TextPosition>,
        /// The fault.
        message: String,
    },
    /// It has settings of earlier releases: each with its remedy, a line each.
    #[error("{0}")]
    Removed(String),
    /// It has the name that a policy had in earlier releases; the words give the present one.
    #[error("scheduler.policy: {0}")]
    RenamedPolicy(String),
    /// A number is outside its bounds.
    #[error("{setting} = {value} is outside {low}..={high}")]
    Outside {
        /// The setting.
        setting: String,
        /// Its value.
        value: f64,
        /// The least that it may be.
        low: f64,
        /// The most that it may be.
        high: f64,
    },
    /// Likewise, for a setting that the file gives with its unit.
    #[error("{setting} = {value} is outside {low}..={high}; {remedy}")]
    OutsideInUnits {
        /// The setting, as the file has it.
        setting: String,
        /// Its value, as the file could have it.
        value: String,
        /// The least that it may be.
        low: String,
        /// The most that it may be.
        high: String,
        /// What to give.
        remedy: &'static str,
    },
    /// The scheduler refuses its settings.
    #[error("{0}")]
    Scheduler(baton_scheduler::ConfigError),
    /// An address of the service is none.
    #[error("service.{setting} = \"{address}\": {why}; give ADDRESS:PORT")]
    Address {
        /// The setting.
        setting: &'static str,
        /// Its value.
        address: String,
        /// Why it is none.
        why: AddrParseError,
    },
    /// One of the settings that go together is missing.
    #[error("{0}")]
    Incomplete(&'static str),
    /// Spans cannot go to the collector.
    #[error(transparent)]
    Collector(#[from] CollectorUrlError),
    /// Two service classes have one name.
    #[error("scheduler.classes[{at}].name = \"{name}\": another class has this name; give each its own")]
    ClassTwice {
        /// The later one's place in the list.
        at: usize,
        /// The name.
        name: String,
    },
    /// Two entries have one key.
    #[error(
        "service.api_keys[{at}].key is that of service.api_keys[{other}], and one key has one tenant; give each its own"
    )]
    KeyTwice {
        /// The later one's place in the list.
        at: usize,
        /// The earlier one's.
        other: usize,
    },
    /// A rule gives a class that there is not.
    #[error(
        "service.class_rules[{at}].class is \"{class}\", and there is no such class in scheduler.classes, which has: \
         {known}; add the class, or name one of these"
    )]
    RuleOfNoClass {
        /// The rule's place in the list.
        at: usize,
        /// The class.
        class: String,
        /// Those that there are.
        known: String,
    },
    /// A rule is about every request.
    #[error(
        "service.class_rules[{0}] has no tenant, model or priority, so that no request would come to a later rule or to \
         its key's class; name one, or put the class first in scheduler.classes"
    )]
    RuleOfAll(usize),
    /// A key names a class that there is not.
    #[error(
        "service.api_keys[{at}].classes names \"{class}\", and there is no such class in scheduler.classes, which has: \
         {known}; add the class, or take it from the key"
    )]
    KeyOfNoClass {
        /// The key's place in the list.
        at: usize,
        /// The class.
        class: String,
        /// Those that there are.
        known: String,
    },
    /// There is no parser of that name; the words give those that there are.
    #[error("router.{setting}: {why}")]
    Parser {
        /// The setting.
        setting: &'static str,
        /// Which there are.
        why: String,
    },
    /// A chunk of mixed steps is given where the engine does not go by it.
    #[error("{setting} = {tokens} has no effect without mix = \"fixed\"; add that, or remove it")]
    ChunkWithoutMix {
        /// The setting.
        setting: String,
        /// Its value.
        tokens: u32,
    },
    /// A pipeline of nodes decodes.
    #[error(
        "{setting} = {nodes}: a pipeline of nodes only prefills, and its passes do not overlap beside decodes; take 1, \
         or role = \"prefill\" without may_change_role"
    )]
    DecodingPipeline {
        /// The setting.
        setting: String,
        /// Its value.
        nodes: u32,
    },
    /// A node may change its role that does both parts or none.
    #[error("{setting} has no effect on the role {role}, which does both parts or none; remove it")]
    RoleStays {
        /// The setting.
        setting: String,
        /// The role.
        role: &'static str,
    },
}

/// A position in a configuration's text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TextPosition {
    /// The line, counted from 1.
    pub line: usize,
    /// The column, counted from 1.
    pub column: Option<usize>,
    /// The setting that the line gives.
    pub setting: Option<String>,
}

impl fmt::Display for TextPosition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "TOML line {}", self.line)?;
        self.column.map_or(Ok(()), |column| write!(f, ", column {column}"))?;
        self.setting.as_ref().map_or(Ok(()), |setting| write!(f, ", {setting}"))
    }
}

fn before(position: &Option<TextPosition>) -> String {
    position.as_ref().map_or_else(String::new, |position| format!("{position}: "))
}
