//! The dialects that are read, by name.

use std::fmt;
use std::str::FromStr;

/// A family of trace files that are read the same way.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Dialect {
    /// JSONL `timestamp, input_length, output_length, hash_ids` (ms, 512-token blocks) and its
    /// relatives: SGLang, vLLM timed traces, AIPerf, Dynamo, GuideLLM. Rows are full context.
    Mooncake,
    /// Mooncake rows in which later turns of a session carry only the new tokens.
    MooncakeDelta,
    /// Mooncake rows that form a graph by `request_id` and `wait_for`.
    AgenticMooncake,
    /// `dynamo.request.trace.v1` records.
    DynamoRequest,
    /// One agent session a row, expanded into its turns.
    AppliedComputeAgentic,
    /// One conversation a row with `requests: [{t, in, out, hash_ids}]`.
    Weka,
    /// OpenTelemetry spans with `gen_ai.*` attributes.
    Otel,
    /// Qwen-Bailian rows: seconds, 16-token blocks, chats linked by parent.
    Bailian,
    /// One conversation a row with `turns: [...]`.
    MultiTurn,
    /// TraceLab rounds of coding agents: prefix and new tokens, no ids.
    TraceLab,
    /// Amazon SageMaker data capture: whole request and response bodies.
    SagemakerCapture,
    /// Azure LLM inference CSV: wall clock and lengths.
    AzureCsv,
    /// BurstGPT CSV: seconds and lengths.
    BurstGptCsv,
    /// splitwise-sim CSV.
    SplitwiseCsv,
    /// Vidur CSV.
    VidurCsv,
}

/// Every dialect with the name it goes by on the command line.
pub const DIALECTS: [(Dialect, &str); 15] = [
    (Dialect::Mooncake, "mooncake"),
    (Dialect::MooncakeDelta, "mooncake-delta"),
    (Dialect::AgenticMooncake, "agentic-mooncake"),
    (Dialect::DynamoRequest, "dynamo"),
    (Dialect::AppliedComputeAgentic, "applied-compute-agentic"),
    (Dialect::Weka, "weka"),
    (Dialect::Otel, "otel"),
    (Dialect::Bailian, "bailian"),
    (Dialect::MultiTurn, "multi-turn"),
    (Dialect::TraceLab, "tracelab"),
    (Dialect::SagemakerCapture, "sagemaker"),
    (Dialect::AzureCsv, "azure-csv"),
    (Dialect::BurstGptCsv, "burstgpt-csv"),
    (Dialect::SplitwiseCsv, "splitwise-csv"),
    (Dialect::VidurCsv, "vidur-csv"),
];

impl Dialect {
    /// The name on the command line and in reports.
    #[must_use]
    pub fn name(self) -> &'static str {
        DIALECTS.iter().find(|(dialect, _)| *dialect == self).map_or("unknown", |(_, name)| name)
    }

    /// Whether rows are comma-separated values under a header line.
    #[must_use]
    pub fn is_csv(self) -> bool {
        matches!(self, Self::AzureCsv | Self::BurstGptCsv | Self::SplitwiseCsv | Self::VidurCsv)
    }
}

impl fmt::Display for Dialect {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Dialect {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wanted = text.to_ascii_lowercase().replace('_', "-");
        DIALECTS.iter().find(|(_, name)| *name == wanted).map(|(dialect, _)| *dialect).ok_or_else(|| {
            let names: Vec<&str> = DIALECTS.iter().map(|(_, name)| *name).collect();
            format!("no dialect is called {text:?}; choose one of {}", names.join(", "))
        })
    }
}

pub(crate) mod applied;
pub(crate) mod bailian;
pub(crate) mod csv_rows;
pub(crate) mod dynamo;
pub(crate) mod mooncake;
pub(crate) mod otel;
pub(crate) mod sagemaker;
pub(crate) mod tracelab;
pub(crate) mod turns;
pub(crate) mod weka;
