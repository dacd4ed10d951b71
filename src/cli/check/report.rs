//! The findings, one line a check.

use comfy_table::ContentArrangement;
use serde::Serialize;

/// How a check came out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum State {
    /// As it should be.
    Ok,
    /// It works, and something about it will surprise.
    Warning,
    /// It will not work.
    Wrong,
    /// Something before it was wrong.
    NotTried,
}

impl State {
    const fn word(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Warning => "warning",
            Self::Wrong => "WRONG",
            Self::NotTried => "not tried",
        }
    }
}

/// A check and how it came out.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Line {
    /// The subject of the check.
    pub check: String,
    /// The check's result.
    pub state: State,
    /// The finding.
    pub found: String,
    /// The remedy; empty when none is needed.
    pub remedy: String,
}

/// All of them, in order.
#[derive(Debug, Default)]
pub struct Report {
    lines: Vec<Line>,
}

impl Report {
    fn add(&mut self, check: &str, state: State, (found, remedy): (String, String)) {
        self.lines.push(Line { check: check.into(), state, found, remedy });
    }

    /// It is as it should be.
    pub fn good_at(&mut self, check: &str, found: impl Into<String>) {
        self.add(check, State::Ok, (found.into(), String::new()));
    }

    /// It works, with a surprise.
    pub fn doubtful(&mut self, check: &str, found: impl Into<String>, remedy: impl Into<String>) {
        self.add(check, State::Warning, (found.into(), remedy.into()));
    }

    /// It will not work.
    pub fn wrong(&mut self, check: &str, found: impl Into<String>, remedy: impl Into<String>) {
        self.add(check, State::Wrong, (found.into(), remedy.into()));
    }

    /// It was not looked at.
    pub fn untried(&mut self, check: &str, why: impl Into<String>) {
        self.add(check, State::NotTried, (why.into(), String::new()));
    }

    /// Whether nothing is wrong.
    pub fn good(&self) -> bool {
        self.lines.iter().all(|line| matches!(line.state, State::Ok | State::Warning))
    }

    /// The lines.
    #[cfg(test)]
    pub fn lines(&self) -> &[Line] {
        &self.lines
    }

    /// For a person.
    pub fn table(&self) -> String {
        let mut table = crate::cli::table::with_header(&["check", "", "found", "do"], 0..0);
        table.set_content_arrangement(ContentArrangement::Dynamic);
        for line in &self.lines {
            table.add_row([&line.check, line.state.word(), &line.found, &line.remedy]);
        }
        let count = |state| self.lines.iter().filter(|line| line.state == state).count();
        format!(
            "{table}\n{} ok, {} warnings, {} wrong, {} not tried\n",
            count(State::Ok),
            count(State::Warning),
            count(State::Wrong),
            count(State::NotTried)
        )
    }

    /// For a script.
    pub fn json(&self) -> String {
        format!("{:#}\n", serde_json::json!({ "ok": self.good(), "checks": self.lines }))
    }
}
