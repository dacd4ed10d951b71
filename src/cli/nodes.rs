//! Nodes by role as people write them: `12p4d` are twelve that prefill and four that decode.

use std::fmt;
use std::str::FromStr;

use anyhow::{Context as _, Result, bail, ensure};
use baton_types::Role;

use crate::config::{Config, PoolConfig};

/// How many nodes prefill, and how many decode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RoleSplit {
    /// Those that prefill.
    pub prefills: u32,
    /// Those that decode.
    pub decodes: u32,
}

impl FromStr for RoleSplit {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Self> {
        let wrong = "give nodes that prefill and nodes that decode, such as 12p4d";
        let lower = text.to_ascii_lowercase();
        let (prefills, decodes) =
            lower.strip_suffix('d').and_then(|rest| rest.split_once('p')).context(wrong)?;
        let count = |digits: &str| digits.parse().ok().filter(|n| (1..=60_000).contains(n)).context(wrong);
        Ok(Self { prefills: count(prefills)?, decodes: count(decodes)? })
    }
}

impl fmt::Display for RoleSplit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}P{}D", self.prefills, self.decodes)
    }
}

impl RoleSplit {
    /// Gives a configuration these nodes, in place of all that compute; those that lend room stay.
    ///
    /// # Errors
    /// Where the pools of a role differ, so that it is not clear which of them to change.
    pub fn apply(self, config: &mut Config) -> Result<()> {
        let pools = &config.cluster.pools;
        let new = [
            PoolConfig { role: Role::Prefill, count: self.prefills, ..like(pools, Role::prefills)? },
            PoolConfig { role: Role::Decode, count: self.decodes, ..like(pools, Role::decodes)? },
        ];
        let lenders = pools.iter().filter(|pool| pool.role == Role::Store);
        config.cluster.pools = new.into_iter().chain(lenders.cloned()).collect();
        Ok(())
    }
}

/// What a node of a role is like.
fn like(pools: &[PoolConfig], has_role: impl Fn(Role) -> bool) -> Result<PoolConfig> {
    let plain = |pool: &PoolConfig| PoolConfig { role: Role::Both, count: 1, ..pool.clone() };
    let mut of_role = pools.iter().filter(|pool| has_role(pool.role)).map(plain);
    let Some(first) = of_role.next() else {
        bail!("nodes: the configuration has no node of each role to go by; give it one");
    };
    ensure!(
        of_role.all(|other| other == first),
        "nodes: two pools of one role differ in the configuration, so nodes by role say too little; give one pool for \
         each role"
    );
    Ok(first)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_are_read_as_they_are_shown() {
        assert_eq!("12p4d".parse().ok(), Some(RoleSplit { prefills: 12, decodes: 4 }));
        assert_eq!("1P2D".parse::<RoleSplit>().ok().map(|split| split.to_string()), Some("1P2D".into()));
        for wrong in ["", "12", "p4d", "12p", "0p4d", "4d12p", "-1p3d", "1p2d3", "99999p1d"] {
            let error = wrong.parse::<RoleSplit>().expect_err(wrong).to_string();
            assert!(error.contains("such as 12p4d"), "{wrong}: {error}");
        }
    }

    #[test]
    fn nodes_keep_what_their_role_has_and_lenders_stay() {
        let mut config = crate::config::parse(
            "[[cluster.pools]]\nrole = \"prefill\"\ncount = 3\ndram_tokens = 5000\n\
             [[cluster.pools]]\nrole = \"decode\"\ncount = 2\nhbm_tokens = 9000\n\
             [[cluster.pools]]\nrole = \"store\"\ndram_tokens = 7000\n",
        )
        .expect("valid");
        let before = config.cluster.pools.clone();
        RoleSplit { prefills: 4, decodes: 1 }.apply(&mut config).expect("one pool for each role");
        let after = &config.cluster.pools;
        assert_eq!(after[0], PoolConfig { count: 4, ..before[0].clone() });
        assert_eq!(after[1], PoolConfig { count: 1, ..before[1].clone() });
        assert_eq!(after[2..], before[2..]);
    }

    #[test]
    fn pools_that_differ_or_lack_a_role_are_refused() {
        let of = |text: &str| {
            let mut config = crate::config::parse(text).expect("valid");
            RoleSplit { prefills: 1, decodes: 1 }.apply(&mut config)
        };
        let two = "[[cluster.pools]]\nrole = \"prefill\"\n[[cluster.pools]]\nrole = \"prefill\"\nhbm_tokens = 9000\n";
        assert!(
            of(&format!("{two}[[cluster.pools]]\nrole = \"decode\""))
                .is_err_and(|e| e.to_string().contains("differ"))
        );
        assert!(
            of("[[cluster.pools]]\nrole = \"prefill\"").is_err_and(|e| e.to_string().contains("no node"))
        );
        assert!(of("[[cluster.pools]]\nrole = \"both\"\ncount = 16").is_ok());
    }
}
