//! `--what-if`: the tuned configuration under another load, or with other nodes.

use std::fmt;
use std::str::FromStr;

use anyhow::{Context as _, Result, bail};

use crate::cli::tune::space::{NodeRoom, split_of};
use crate::config::{Config, PoolConfig};

/// What is different.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum WhatIfScenario {
    /// The load, times this.
    Traffic(f64),
    /// DRAM of every node, times this.
    Dram(f64),
    /// SSD of every node, times this.
    Ssd(f64),
    /// So many nodes more or less, in the ratio of those there are.
    Nodes(i32),
}

impl FromStr for WhatIfScenario {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Self> {
        let wrong = "give traffic=FACTOR, dram=FACTOR, ssd=FACTOR (0 to 100), or nodes=+COUNT or -COUNT";
        let (name, value) = text.split_once('=').context(wrong)?;
        let factor = |least: f64| {
            value.parse::<f64>().ok().filter(|factor| (least..=100.0).contains(factor)).context(wrong)
        };
        match name {
            "traffic" => Ok(Self::Traffic(factor(0.01)?)),
            "dram" => Ok(Self::Dram(factor(0.0)?)),
            "ssd" => Ok(Self::Ssd(factor(0.0)?)),
            "nodes" if value.starts_with(['+', '-']) => value.parse().map(Self::Nodes).ok().context(wrong),
            _ => bail!(wrong),
        }
    }
}

impl fmt::Display for WhatIfScenario {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Traffic(factor) => write!(f, "traffic ×{factor}"),
            Self::Dram(factor) => write!(f, "DRAM ×{factor}"),
            Self::Ssd(factor) => write!(f, "SSD ×{factor}"),
            Self::Nodes(count) => write!(f, "{count:+} nodes"),
        }
    }
}

impl WhatIfScenario {
    /// The configuration and the factor on the load that it means.
    ///
    /// # Errors
    /// There is nothing of what it changes, or too little is left.
    pub fn apply(self, config: &Config) -> Result<(Config, f64)> {
        let mut config = config.clone();
        match self {
            Self::Traffic(factor) => return Ok((config, factor)),
            Self::Dram(factor) => scale(&mut config, factor, "DRAM", |pool| &mut pool.dram_tokens)?,
            Self::Ssd(factor) => scale(&mut config, factor, "SSD", |pool| &mut pool.ssd_tokens)?,
            Self::Nodes(count) => {
                let now = split_of(&config, None)?;
                let nodes = (now.prefills + now.decodes).saturating_add_signed(count);
                split_of(&config, Some(nodes))?.apply(&mut config)?;
            }
        }
        Ok((config, 1.0))
    }
}

/// Refuses what no tuned configuration can answer, before anything is searched.
pub fn check(scenarios: &[WhatIfScenario], base: &Config, room: NodeRoom) -> Result<()> {
    let mut most = base.clone();
    for pool in &mut most.cluster.pools {
        pool.dram_tokens = pool.dram_tokens.max(room.dram_tokens);
        pool.ssd_tokens = pool.ssd_tokens.max(room.ssd_tokens);
    }
    for scenario in scenarios {
        let remedy = match scenario {
            WhatIfScenario::Dram(_) => "leave that out, or give --dram-tokens",
            WhatIfScenario::Ssd(_) => "leave that out, or give --ssd-tokens",
            WhatIfScenario::Traffic(_) | WhatIfScenario::Nodes(_) => "leave that out",
        };
        scenario.apply(&most).with_context(|| format!("--what-if: {scenario}: {remedy}"))?;
    }
    Ok(())
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    clippy::cast_precision_loss,
    reason = "token counts are far below 2^53"
)]
fn scale(
    config: &mut Config,
    factor: f64,
    name: &str,
    tier: impl Fn(&mut PoolConfig) -> &mut u64,
) -> Result<()> {
    if config.cluster.pools.iter_mut().all(|pool| *tier(pool) == 0) {
        bail!("the nodes hold no KV in {name}");
    }
    for pool in &mut config.cluster.pools {
        let tokens = tier(pool);
        *tokens = (*tokens as f64 * factor) as u64;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scenarios_are_read_and_applied() {
        let mut config = Config::default();
        config.cluster.pools[0].dram_tokens = 1000;
        let of = |text: &str| text.parse::<WhatIfScenario>().expect(text).apply(&config).expect(text);
        assert_eq!(of("traffic=2"), (config.clone(), 2.0));
        assert_eq!(of("dram=0.5").0.cluster.pools[0].dram_tokens, 500);
        let counts: Vec<u32> = of("nodes=-4").0.cluster.pools.iter().map(|pool| pool.count).collect();
        assert_eq!(counts, [6, 6]);
        let shown = ["traffic=2", "nodes=+2"].map(|t| t.parse::<WhatIfScenario>().expect(t).to_string());
        assert_eq!(shown, ["traffic ×2", "+2 nodes"]);
    }

    #[test]
    fn what_makes_no_sense_is_refused() {
        for text in ["traffic", "traffic=0", "traffic=-1", "nodes=2", "nodes=+x", "disk=2", "dram=nan"] {
            let error = text.parse::<WhatIfScenario>().expect_err(text).to_string();
            assert!(error.contains("traffic=FACTOR"), "{text}: {error}");
        }
        let config = Config::default();
        assert!(
            WhatIfScenario::Ssd(0.5).apply(&config).is_err_and(|e| e.to_string().contains("no KV in SSD"))
        );
        assert!(
            WhatIfScenario::Nodes(-15).apply(&config).is_err_and(|e| e.to_string().contains("2 or more"))
        );
    }
}
