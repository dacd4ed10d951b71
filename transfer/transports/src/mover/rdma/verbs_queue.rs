//! The thin layer over libibverbs: completion queues and reliable connected queue pairs.
#![allow(unsafe_code, reason = "calls libibverbs; each block is argued")]

use std::ffi::{c_int, c_uint, c_void};
use std::io;
use std::mem;
use std::os::fd::BorrowedFd;
use std::ptr::{self, NonNull};
use std::sync::Arc;

use super::verbs::{Context, Domain, ffi, last_error, returned};

/// Where completion queues of a device say that they are no longer empty.
pub(super) struct Channel {
    raw: NonNull<ffi::ibv_comp_channel>,
    context: Arc<Context>,
}

// SAFETY: libibverbs is thread-safe; freed once, by the last owner.
unsafe impl Send for Channel {}
// SAFETY: as above.
unsafe impl Sync for Channel {}

impl Channel {
    pub(super) fn new(context: &Arc<Context>) -> io::Result<Arc<Self>> {
        // SAFETY: the context is open.
        let raw = unsafe { ffi::ibv_create_comp_channel(context.raw()) };
        let raw = NonNull::new(raw).ok_or_else(|| last_error("making a completion channel"))?;
        Ok(Arc::new(Self { raw, context: context.clone() }))
    }

    /// The descriptor that becomes readable when a queue has a completion.
    pub(super) fn file(&self) -> BorrowedFd<'_> {
        // SAFETY: the descriptor belongs to the channel and stays open as long as it, which `self` borrows.
        unsafe { BorrowedFd::borrow_raw((*self.raw.as_ptr()).fd) }
    }

    /// The token of a queue that is no longer empty; waits for one unless [`Channel::file`] is set not to.
    pub(super) fn next(&self) -> io::Result<u64> {
        let (mut queue, mut token) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: the channel is open and both places outlive the call.
        if unsafe { ffi::ibv_get_cq_event(self.raw.as_ptr(), &mut queue, &mut token) } != 0 {
            return Err(last_error("asking for a completion event"));
        }
        // SAFETY: a queue with an event that is not acknowledged is not freed: `ibv_destroy_cq` waits for this.
        unsafe { ffi::ibv_ack_cq_events(queue, 1) };
        Ok(token as u64)
    }
}

impl Drop for Channel {
    fn drop(&mut self) {
        // SAFETY: made by us; its queues hold an `Arc` to it, so are gone.
        unsafe { ffi::ibv_destroy_comp_channel(self.raw.as_ptr()) };
    }
}

/// A completion of a work request.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct WorkCompletion {
    /// The number that the request had.
    pub id: u64,
    /// 0 for success, else one of the statuses of verbs.
    pub status: u32,
    /// How many bytes have come, for a receive.
    pub bytes: u32,
}

/// Status of a request that the peer refused for its key or range.
pub(super) const REMOTE_ACCESS: u32 = ffi::ibv_wc_status::IBV_WC_REM_ACCESS_ERR;
/// Status of a request whose peer gave no answer.
pub(super) const NO_ANSWER: u32 = ffi::ibv_wc_status::IBV_WC_RETRY_EXC_ERR;
/// Status of a request that was outstanding when its queue pair failed.
pub(super) const FLUSHED: u32 = ffi::ibv_wc_status::IBV_WC_WR_FLUSH_ERR;

/// How many completions are taken at once.
const POLLED_MAX: usize = 32;

/// A completion queue.
pub(super) struct Cq {
    raw: NonNull<ffi::ibv_cq>,
    channel: Arc<Channel>,
}

// SAFETY: libibverbs is thread-safe; freed once, by the last owner.
unsafe impl Send for Cq {}
// SAFETY: as above.
unsafe impl Sync for Cq {}

impl Cq {
    /// A queue for `depth` completions, known on its channel by `token`.
    pub(super) fn new(channel: &Arc<Channel>, depth: u32, token: u64) -> io::Result<Arc<Self>> {
        let depth = c_int::try_from(depth).map_err(io::Error::other)?;
        // SAFETY: context and channel are open; the token is only ever given back, never followed.
        let raw = unsafe {
            ffi::ibv_create_cq(channel.context.raw(), depth, token as *mut c_void, channel.raw.as_ptr(), 0)
        };
        let raw = NonNull::new(raw).ok_or_else(|| last_error("making a completion queue"))?;
        Ok(Arc::new(Self { raw, channel: channel.clone() }))
    }

    /// Takes some completions; none when it is empty.
    pub(super) fn poll(&self, into: &mut Vec<WorkCompletion>) -> io::Result<usize> {
        // SAFETY: structs of plain numbers, for which zero bytes are valid.
        let mut taken: [ffi::ibv_wc; POLLED_MAX] = unsafe { mem::zeroed() };
        // SAFETY: the queue is open and the array has room for as many as are asked for.
        let count = unsafe { ffi::ibv_poll_cq(self.raw.as_ptr(), POLLED_MAX as i32, taken.as_mut_ptr()) };
        let count = usize::try_from(count).map_err(|_| last_error("taking completions"))?;
        let seen = taken.iter().take(count);
        into.extend(seen.map(|one| WorkCompletion {
            id: one.wr_id,
            status: one.status,
            bytes: one.byte_len,
        }));
        Ok(count)
    }

    /// Asks for one event when the next completion comes. Those that came before the call give none: poll
    /// once more after it.
    pub(super) fn arm(&self) -> io::Result<()> {
        // SAFETY: the queue is open.
        returned("arming a completion queue", unsafe { ffi::ibv_req_notify_cq(self.raw.as_ptr(), 0) })
    }
}

impl Drop for Cq {
    fn drop(&mut self) {
        let _ = &self.channel;
        // SAFETY: made by us; its queue pairs hold an `Arc` to it, so are gone.
        unsafe { ffi::ibv_destroy_cq(self.raw.as_ptr()) };
    }
}

/// The operation of a work request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verb {
    Write,
    Read,
    Send,
}

/// A request for a device.
#[derive(Clone, Copy, Debug)]
pub(super) struct Work {
    pub id: u64,
    pub verb: Verb,
    pub local_address: u64,
    pub local_key: u32,
    pub bytes: u32,
    pub remote_address: u64,
    pub remote_key: u32,
    /// Whether its success gives a completion; its failure always does.
    pub signalled: bool,
}

/// Where the other end of a queue pair is, and how to get there.
#[derive(Clone, Copy, Debug)]
pub(super) struct Route {
    pub port: u8,
    pub gid_index: u8,
    pub peer_gid: [u8; 16],
    pub peer_lid: u16,
    pub infiniband: bool,
    pub mtu_code: u8,
    pub service_level: u8,
    pub traffic_class: u8,
    /// Reads under way at once, of ours and of the peer's.
    pub reads_out: u8,
    pub reads_in: u8,
    /// How long the device waits for an answer (4.096 µs times two to the power of this), and how often.
    pub ack_timeout_exponent: u8,
    pub retries: u8,
}

/// A reliable connected queue pair.
pub(super) struct Qp {
    raw: NonNull<ffi::ibv_qp>,
    _cq: Arc<Cq>,
    _domain: Arc<Domain>,
}

// SAFETY: libibverbs is thread-safe; freed once, by the owner.
unsafe impl Send for Qp {}
// SAFETY: as above.
unsafe impl Sync for Qp {}

type Mask = ffi::ibv_qp_attr_mask;

impl Qp {
    /// Makes a queue pair in the state INIT. The device reports its errors under `token`.
    pub(super) fn new(
        domain: &Arc<Domain>,
        cq: &Arc<Cq>,
        (sends, receives): (u32, u32),
        port: u8,
        token: u64,
    ) -> io::Result<Self> {
        // SAFETY: a struct of numbers and pointers, for which zero bytes are valid.
        let mut attr: ffi::ibv_qp_init_attr = unsafe { mem::zeroed() };
        attr.qp_context = token as *mut c_void;
        attr.send_cq = cq.raw.as_ptr();
        attr.recv_cq = cq.raw.as_ptr();
        attr.cap.max_send_wr = sends;
        attr.cap.max_recv_wr = receives;
        attr.cap.max_send_sge = 1;
        attr.cap.max_recv_sge = 1;
        attr.qp_type = ffi::ibv_qp_type::IBV_QPT_RC;
        // SAFETY: domain and queue are open and outlive the queue pair, which holds both.
        let raw = unsafe { ffi::ibv_create_qp(domain.raw(), &mut attr) };
        let raw = NonNull::new(raw).ok_or_else(|| last_error("making a queue pair"))?;
        let made = Self { raw, _cq: cq.clone(), _domain: domain.clone() };
        made.initialise(port)?;
        Ok(made)
    }

    fn initialise(&self, port: u8) -> io::Result<()> {
        let mut attr = blank();
        attr.qp_state = ffi::ibv_qp_state::IBV_QPS_INIT;
        attr.port_num = port;
        let remote = ffi::ibv_access_flags::IBV_ACCESS_REMOTE_READ.0
            | ffi::ibv_access_flags::IBV_ACCESS_REMOTE_WRITE.0;
        attr.qp_access_flags = remote as c_uint;
        let mask =
            [Mask::IBV_QP_STATE, Mask::IBV_QP_PKEY_INDEX, Mask::IBV_QP_PORT, Mask::IBV_QP_ACCESS_FLAGS];
        self.modify("setting up a queue pair", attr, &mask)
    }

    /// Connects it: it takes what the peer sends, and may send.
    pub(super) fn connect(&self, route: &Route, peer_number: u32, (from, to): (u32, u32)) -> io::Result<()> {
        let mut attr = blank();
        attr.qp_state = ffi::ibv_qp_state::IBV_QPS_RTR;
        attr.path_mtu = route.mtu_code.into();
        attr.dest_qp_num = peer_number;
        attr.rq_psn = from;
        attr.max_dest_rd_atomic = route.reads_in;
        attr.min_rnr_timer = 12;
        attr.ah_attr = address(route);
        let mask = [
            Mask::IBV_QP_STATE,
            Mask::IBV_QP_AV,
            Mask::IBV_QP_PATH_MTU,
            Mask::IBV_QP_DEST_QPN,
            Mask::IBV_QP_RQ_PSN,
            Mask::IBV_QP_MAX_DEST_RD_ATOMIC,
            Mask::IBV_QP_MIN_RNR_TIMER,
        ];
        self.modify("connecting a queue pair to its peer", attr, &mask)?;
        let mut attr = blank();
        attr.qp_state = ffi::ibv_qp_state::IBV_QPS_RTS;
        attr.timeout = route.ack_timeout_exponent;
        attr.retry_cnt = route.retries;
        // 7 is without end; but a receive is always posted before a message can come.
        attr.rnr_retry = 6;
        attr.sq_psn = to;
        attr.max_rd_atomic = route.reads_out;
        let mask = [
            Mask::IBV_QP_STATE,
            Mask::IBV_QP_TIMEOUT,
            Mask::IBV_QP_RETRY_CNT,
            Mask::IBV_QP_RNR_RETRY,
            Mask::IBV_QP_SQ_PSN,
            Mask::IBV_QP_MAX_QP_RD_ATOMIC,
        ];
        self.modify("letting a queue pair send", attr, &mask)
    }

    fn modify(&self, what: &str, mut attr: ffi::ibv_qp_attr, mask: &[Mask]) -> io::Result<()> {
        let bits = mask.iter().fold(0, |bits, one| bits | one.0);
        let bits = c_int::try_from(bits).expect("the flags are small bits");
        // SAFETY: the queue pair is open and `attr` outlives the call.
        returned(what, unsafe { ffi::ibv_modify_qp(self.raw.as_ptr(), &mut attr, bits) })
    }

    /// The number by which the peer names it.
    pub(super) fn number(&self) -> u32 {
        // SAFETY: valid until dropped, and constant.
        unsafe { (*self.raw.as_ptr()).qp_num }
    }

    /// Stops it: what is outstanding is flushed and nothing more goes out or comes in.
    pub(super) fn stop(&self) -> io::Result<()> {
        let mut attr = blank();
        attr.qp_state = ffi::ibv_qp_state::IBV_QPS_ERR;
        self.modify("stopping a queue pair", attr, &[Mask::IBV_QP_STATE])
    }

    /// Posts work requests to the device, in order, in one call. After an error it is unknown which the device took,
    /// so the queue pair is unusable.
    pub(super) fn post(&self, works: &[Work]) -> io::Result<()> {
        let mut ranges: Vec<ffi::ibv_sge> = works
            .iter()
            .map(|work| ffi::ibv_sge { addr: work.local_address, length: work.bytes, lkey: work.local_key })
            .collect();
        let mut requests: Vec<ffi::ibv_send_wr> = works.iter().map(request).collect();
        let count = requests.len();
        let (range, first) = (ranges.as_mut_ptr(), requests.as_mut_ptr());
        for at in 0..count {
            // SAFETY: both vectors have `count` entries and keep their place until the call below is over.
            unsafe {
                (*first.add(at)).sg_list = range.add(at);
                (*first.add(at)).next = if at + 1 < count { first.add(at + 1) } else { ptr::null_mut() };
            }
        }
        if count == 0 {
            return Ok(());
        }
        let mut refused = ptr::null_mut();
        // SAFETY: the queue pair is open; the chain is well formed and the device copies it before the call returns.
        // The device checks the ranges in it against registered regions.
        returned("posting requests", unsafe { ffi::ibv_post_send(self.raw.as_ptr(), first, &mut refused) })
    }

    /// Offers a range for a message to come.
    pub(super) fn receive(&self, id: u64, address: u64, key: u32, bytes: u32) -> io::Result<()> {
        let mut range = ffi::ibv_sge { addr: address, length: bytes, lkey: key };
        let mut request =
            ffi::ibv_recv_wr { wr_id: id, next: ptr::null_mut(), sg_list: &mut range, num_sge: 1 };
        let mut refused = ptr::null_mut();
        // SAFETY: as in `post`.
        let code = unsafe { ffi::ibv_post_recv(self.raw.as_ptr(), &mut request, &mut refused) };
        returned("posting a receive", code)
    }
}

fn blank() -> ffi::ibv_qp_attr {
    // SAFETY: a struct of plain numbers, for which zero bytes are valid.
    unsafe { mem::zeroed() }
}

fn address(route: &Route) -> ffi::ibv_ah_attr {
    // SAFETY: a struct of plain numbers, for which zero bytes are valid.
    let mut attr: ffi::ibv_ah_attr = unsafe { mem::zeroed() };
    attr.port_num = route.port;
    attr.sl = route.service_level;
    attr.dlid = route.peer_lid;
    // RoCE is always global; InfiniBand inside one subnet goes by its local address.
    if !route.infiniband {
        attr.is_global = 1;
        attr.grh.dgid = ffi::ibv_gid { raw: route.peer_gid };
        attr.grh.sgid_index = route.gid_index;
        attr.grh.hop_limit = 64;
        attr.grh.traffic_class = route.traffic_class;
    }
    attr
}

fn request(work: &Work) -> ffi::ibv_send_wr {
    // SAFETY: a struct of numbers and pointers, for which zero bytes are valid.
    let mut request: ffi::ibv_send_wr = unsafe { mem::zeroed() };
    request.wr_id = work.id;
    request.num_sge = 1;
    request.opcode = match work.verb {
        Verb::Write => ffi::ibv_wr_opcode::IBV_WR_RDMA_WRITE,
        Verb::Read => ffi::ibv_wr_opcode::IBV_WR_RDMA_READ,
        Verb::Send => ffi::ibv_wr_opcode::IBV_WR_SEND,
    };
    if work.signalled {
        request.send_flags = ffi::ibv_send_flags::IBV_SEND_SIGNALED.0;
    }
    request.wr.rdma = ffi::rdma_t { remote_addr: work.remote_address, rkey: work.remote_key };
    request
}

impl Drop for Qp {
    fn drop(&mut self) {
        // SAFETY: made by us and destroyed once. When it returns, the device neither reads nor writes for it.
        unsafe { ffi::ibv_destroy_qp(self.raw.as_ptr()) };
    }
}
