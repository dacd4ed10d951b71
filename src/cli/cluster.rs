//! From a configuration to a simulated cluster.

use std::collections::HashMap;
use std::sync::Arc;

use anyhow::{Error, Result};
use baton_sim::engine::Mix;
use baton_sim::{Pool, Setup, profiles};
use baton_types::CostProfile;
use baton_types::simulated::FaultPlan;

use crate::config::{Config, MixMode, PoolConfig};

/// The set-up that a configuration describes, with one seed for everything random in it.
pub fn setup(config: &Config, seed: u64) -> Result<Setup> {
    let mut known = HashMap::new();
    let mut pools = Vec::new();
    for pool in &config.cluster.pools {
        let name = if pool.profile.is_empty() { &config.cluster.profile } else { &pool.profile };
        let profile = match known.get(name) {
            Some(profile) => Arc::clone(profile),
            None => Arc::new(profiles::find(name)?),
        };
        known.insert(name.clone(), Arc::clone(&profile));
        pools.push(self::pool(pool, profile, config));
    }
    let mut scheduler = config.scheduler.clone();
    scheduler.seed = seed;
    let setup = Setup {
        pools,
        network: config.network,
        eviction: config.store.eviction,
        offload: config.store.offload.of(false),
        ssd_second_touch: config.store.ssd_second_touch,
        handoff: config.cluster.handoff,
        net_latency_us: config.cluster.net_latency_us,
        shared_links: config.cluster.shared_links,
        clients: config.clients,
        faults: FaultPlan { seed, ..config.faults },
        routers: config.cluster.routers,
        router_sync_us: config.cluster.router_sync_us,
        stage_slack: config.service.stage_slack,
        stage_floor_us: config.service.stage_floor_us,
        seed,
        ..Setup::disaggregated(0, 0, &empty_profile()?, scheduler)
    };
    setup.validate().map_err(Error::msg)?;
    Ok(setup)
}

fn empty_profile() -> Result<Arc<CostProfile>> {
    Ok(Arc::new(profiles::find("llama3-70b-8xa100")?))
}

fn pool(pool: &PoolConfig, profile: Arc<CostProfile>, config: &Config) -> Pool {
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "bounds were checked")]
    let rate = |giga: f64| (giga * 1e9) as u64;
    Pool {
        role: pool.role,
        count: pool.count,
        profile,
        hbm_tokens: (pool.hbm_tokens > 0).then_some(pool.hbm_tokens),
        dram_tokens: pool.dram_tokens,
        ssd_tokens: pool.ssd_tokens,
        pass_tokens: pool.pass_tokens,
        pipeline_nodes: pool.pipeline_nodes,
        max_running: (pool.max_running > 0).then_some(pool.max_running),
        mix: match pool.mix {
            MixMode::Target => Mix::Target(config.scheduler.step_target_us()),
            MixMode::Fixed if pool.mixed_chunk_tokens == 0 => Mix::Fixed(pool.pass_tokens),
            MixMode::Fixed => Mix::Fixed(pool.mixed_chunk_tokens),
            MixMode::PrefillFirst => Mix::PrefillFirst,
        },
        prefix_cache: pool.prefix_cache,
        net_bytes_per_s: rate(pool.net_gbps / 8.0),
        host_bytes_per_s: rate(pool.host_gb_per_s),
        ssd_bytes_per_s: rate(pool.ssd_gb_per_s),
        may_change_role: pool.may_change_role,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_default_is_eight_and_eight_and_valid() {
        let setup = setup(&Config::default(), 7).expect("the default cluster");
        assert_eq!(setup.instances(), 16);
        assert_eq!(setup.pools[0].net_bytes_per_s, 100_000_000_000);
        assert_eq!(setup.pools[1].mix, Mix::Target(90_000), "what the service's own nodes do");
        assert_eq!((setup.scheduler.seed, setup.faults.seed), (7, 7));
        assert_eq!(setup.network, Config::default().network);
    }

    #[test]
    fn speeds_and_noise_of_engines_and_links_are_faults_within_bounds() {
        let parsed = |text| crate::config::parse(text);
        let of =
            |text| setup(&parsed(text).expect("valid"), 1).expect("a cluster").faults.engine_speed_permille;
        assert_eq!((of(""), of("[faults]\nengine_speed_permille = 667")), (1000, 667));
        let error = parsed("[faults]\nengine_speed_permille = 99").expect_err("below the bounds").to_string();
        assert!(error.contains("faults.engine_speed_permille"), "{error}");
        let text = "[faults]\nengine_noise_permille = 900\nslow_nodes_last = true";
        let faults = setup(&parsed(text).expect("valid"), 1).expect("a cluster").faults;
        assert_eq!((faults.engine_noise_permille, faults.slow_nodes_last), (900, true));
        let of =
            |text| setup(&parsed(text).expect("valid"), 1).expect("a cluster").faults.link_speed_permille;
        assert_eq!((of(""), of("[faults]\nlink_speed_permille = 250")), (1000, 250));
        let error = parsed("[faults]\nlink_speed_permille = 9").expect_err("below the bounds").to_string();
        assert!(error.contains("faults.link_speed_permille"), "{error}");
        let error = parsed("[faults]\nengine_noise_permille = 901").expect_err("beyond").to_string();
        assert!(error.contains("faults.engine_noise_permille"), "{error}");
    }

    #[test]
    fn chunks_are_as_the_file_says() {
        let mut config = Config::default();
        (config.cluster.pools[0].mix, config.cluster.pools[0].mixed_chunk_tokens) = (MixMode::Fixed, 512);
        let setup = setup(&config, 1).expect("a valid cluster");
        let mixes: Vec<Mix> = setup.pools.iter().map(|p| p.mix).collect();
        assert_eq!(mixes, [Mix::Fixed(512), Mix::Target(90_000)]);
    }

    #[test]
    fn a_cluster_that_cannot_hold_the_kv_is_refused_before_any_work() {
        let mut config = Config::default();
        config.cluster.pools[0].hbm_tokens = 20;
        let error = setup(&config, 1).expect_err("less than two blocks").to_string();
        assert!(error.contains("20 KV tokens") && error.contains("hbm_tokens"), "{error}");
        config.cluster.pools.truncate(1);
        config.cluster.pools[0].hbm_tokens = 0;
        assert!(setup(&config, 1).is_err_and(|e| e.to_string().contains("no instance decodes")));
    }
}
