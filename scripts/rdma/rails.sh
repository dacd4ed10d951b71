# Two rails between two ends of this guest, for the scripts that run in it: source this file.
# Rail r is a pair of virtual links, ar and br, with the addresses 10.0.r.1 and 10.0.r.2 and one RDMA device
# on each, rxe_ar and rxe_br. Traffic between two local addresses would go over lo, where no RDMA device is:
# each end therefore has a routing table of its own, which holds for what is sent from it.

rail_end() { # NAME MAC ADDRESS PEER_MAC PEER_ADDRESS TABLE: (again) after its link has come up
    ip address replace "$3/24" dev "$1"
    ip route replace "${3%.*}.0/24" dev "$1" src "$3" table "$6"
    ip neigh replace "$5" lladdr "$4" dev "$1" nud permanent
    ip rule del pref 5 oif "$1" 2>/dev/null || true
    ip rule add pref 5 oif "$1" lookup "$6"
}

rail_up() { # RAIL: both links up, with routes and neighbours, which a link that goes down loses
    local r=$1
    ip link set "a$r" up
    ip link set "b$r" up
    rail_end "a$r" "02:00:00:00:0$r:01" "10.0.$r.1" "02:00:00:00:0$r:02" "10.0.$r.2" "$((100 + 2 * r))"
    rail_end "b$r" "02:00:00:00:0$r:02" "10.0.$r.2" "02:00:00:00:0$r:01" "10.0.$r.1" "$((101 + 2 * r))"
}

rails() { # COUNT
    local r
    ip link set lo up
    for r in all default; do
        echo 0 >/proc/sys/net/ipv4/conf/$r/rp_filter
        echo 1 >/proc/sys/net/ipv4/conf/$r/accept_local
    done
    ip rule add pref 10 lookup local
    ip rule del pref 0
    for ((r = 0; r < $1; r++)); do
        ip link add "a$r" mtu 9000 address "02:00:00:00:0$r:01" type veth \
            peer name "b$r" mtu 9000 address "02:00:00:00:0$r:02"
        rail_up "$r"
        rdma link add "rxe_a$r" type rxe netdev "a$r"
        rdma link add "rxe_b$r" type rxe netdev "b$r"
    done
}
