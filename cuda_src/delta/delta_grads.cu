// The gradients of the delta rule that need both states: dq, dk, dg, dbeta, from S traversed forward again and dS of
// every chunk.
//
//     Z = scale E . lower of dO U^T,     Y = -E . strict lower of dW U^T     (gradients of the decayed Q K^T and K K^T)
//     dq = scale e dO S + Z K,              r = -e dW S + Y K                    (the key as it reads)
//     dk = r + d U dS + Z^T Q + Y^T K,       dbeta_i = (dW_i.v_i + r_i.k_i) / beta_i
//     db = q.dq + 2 k.r - k.dk, its last row also <S,
//         dS> after the chunk;  dg = db summed from each token to the chunk's end
//
// With LA_UNIT Z has rq_i and rk_j, Y rk_i and rk_j, so that the sums are rq dq^ and rk dk^; each row is then projected
// onto the orthogonal complement of q_i or k_i (the derivative of the normalisation).
//
// The gradient of K K^T is one masked product; none of the inverse is needed. Warpgroups 0 and 1 scan the chain of
// delta_chain.cu, 64 value rows each, a chunk ahead, and copy every tile in as soon as its place is free; 2 and 3 make
// the gradients, 64 key columns each: 2 makes Z, 3 makes Y.
#include "delta/delta_grad_states.cuh"

// Z (group 0) or Y (group 1) of a warp's 16 rows, from the accumulators to shared memory.
// factor: of the lane's two rows
LA_DEVICE void store_masked(const float (&p)[8][4], u32 to, const float* sums, const float (&factor)[2], int group,
                            int warp, int lane) {
    const int row = lane >> 2, column = (lane & 3) * 2;
    const float bi[2] = {sums[16 * warp + row], sums[16 * warp + row + 8]},
                middle = sums[16 * warp];   // left of the own block: two factors, both <= 1
    const float to_row[2] = {factor[0] * decay_between(bi[0], middle), factor[1] * decay_between(bi[1], middle)};
#pragma unroll
    for (int j = 0; j < 4; j++) {
        u32 x[4] = {0, 0, 0, 0};
        if (j <= warp)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const float2 bj = pair_at(sums, 16 * j + 8 * h + column);
                const float2 rk = LA_UNIT ? pair_at(sums + C, 16 * j + 8 * h + column) : float2{1.f, 1.f};
                const float (&y)[4] = p[2 * j + h];
                if (j < warp) {
                    const float u = rk.x * decay_between(middle, bj.x), v = rk.y * decay_between(middle, bj.y);
#pragma unroll
                    for (int m = 0; m < 2; m++)
                        x[2 * h + m] = pack_bf16(to_row[m] * u * y[2 * m], to_row[m] * v * y[2 * m + 1]);
                } else {
                    const int ahead = 8 * h + column + group - row;   // Y is strictly lower
#pragma unroll
                    for (int m = 0; m < 2; m++) {
                        const float u = factor[m] * rk.x * decay_between(bi[m], bj.x) * y[2 * m],
                                    v = factor[m] * rk.y * decay_between(bi[m], bj.y) * y[2 * m + 1];
                        x[2 * h + m] = pack_bf16(ahead <= 8 * m ? u : 0.f, ahead < 8 * m ? v : 0.f);
                    }
                }
            }
        store_matrix(to ^ (j << 5), x[0], x[1], x[2], x[3]);
    }
}

// rows of a panel of a chunk that is another sequence's in part: 64 columns from `column` on, `own` rows, of tokens of
// STEPS the last
template <int STEPS> LA_DEVICE void store_own(char* rows, i64 stride, u32 panel, int column, int width, int own,
                                              int thread) {
    for (int i = thread; i < own * 8; i += 128) {
        const int r = i >> 3, c = i & 7;
        copy_out<16>(rows + r * stride + (column + c * 8) * 2, panel + Square::piece(r, c),
                     r % STEPS == STEPS - 1 && column + c * 8 < width);
    }
}

// Stages of a chunk, begun: a gram of two tiles; a tile times the state; += a gram times the keys
LA_DEVICE void begin_gram(float (&p)[8][4], u64 outputs, u64 written) {
    accumulator_fence(p);
    products_begin();
    multiply_ABt<Tokens>(p, outputs, written);
    products_commit();
}
LA_DEVICE void begin_read(float (&x)[8][4], u64 tile, u64 state) {
    accumulator_fence(x);
    products_begin();
#pragma unroll
    for (int d = 0; d < 8; d++) product_AB(x, tile + Tokens::along(d), state + Whole::across(d), d > 0);
    products_commit();
}
LA_DEVICE void begin_apply(float (&x)[8][4], u64 gram, u64 keys) {
    accumulator_fence(x);
    products_begin();
#pragma unroll
    for (int d = 0; d < 4; d++) product_AB(x, gram + Square::along(d), keys + Tokens::across(d), true);
    products_commit();
}

LA_DEVICE void gradients(const DeltaArguments& a, const DeltaTraversal& traversal, unsigned char* memory, u32 shared,
                         GradBarriers bar, int warp, int lane) {
    const int group = warp >> 2, quarter = warp & 3, stop = traversal.first + traversal.steps,
              thread = (warp & 3) * 32 + lane;
    const bool leader = thread == 0;
    const int i0 = 16 * quarter + (lane >> 2), i1 = i0 + 8;
    const u32 rows = Square::block_piece(16 * quarter, 0, lane & 15, lane >> 4);   // of this lane in a panel
    float* dots = (float*)(memory + AT_DOTS);
    auto partial = [&](int chunk) { return a.offsets && chunk * C + C > traversal.sequence.T; };
    for (int chunk = traversal.first; chunk < stop; chunk++) {
        const int step = chunk - traversal.first, s = step & 1;
        const float* e = (const float*)(memory + AT_CHECKPOINTS + s * CHECKPOINT_SUMS + AT_E);
        const float* checkpoint = (const float*)(a.checkpoints + (traversal.block + chunk) * CHECKPOINT);
        const u32 keys = shared + AT_K + s * SLOT, new_values = shared + AT_V + s * SLOT;
        auto at = [&](int place) { return panel_descriptor(opaque(shared) + place); };
        float x[8][4], y[8][4], dot[2] = {0.f, 0.f}, early[2] = {0.f, 0.f};
        if (LA_UNIT) {   // rq, from memory
            early[0] = checkpoint[AT_QUERY / 4 + i0];
            early[1] = checkpoint[AT_QUERY / 4 + i1];
        }
        barrier_wait(bar.chunk(s), step >> 1 & 1);
        barrier_wait(bar.outputs(), s);
        if (partial(chunk)) {
            clear_rows<256, 4>(shared + AT_DOUT, traversal.own(a, chunk), warp * 32 + lane);   // and dv behind it
            publish_shared();
            groups_barrier<256>(1);
        }
        barrier_wait(bar.new_values(), s);
        {
            float p[8][4];
            const u64 outputs = at(group ? AT_DV : AT_DOUT), written = panel_descriptor(opaque(new_values));
            begin_gram(p, outputs, written);   // dO U^T, dW U^T
            const u64 dv = at(AT_DV), state = at(AT_STATE + group * Whole::PANEL);
            begin_read(y, dv, state);   // dW S
            if (step) {
                if (leader) {
                    out_read();
                    barrier_arrive(bar.queries_free());
                }
                __syncwarp();
                barrier_wait(bar.chunk_free(), s ^ 1);
            }
            end_products<1>(p);
            float factor[2] = {group ? -1.f : a.scale, group ? -1.f : a.scale};
            if (LA_UNIT) {
                factor[0] *= group ? e[3 * C + i0] : early[0];
                factor[1] *= group ? e[3 * C + i1] : early[1];
            }
            store_masked(p, opaque(shared) + (group ? AT_Y : AT_Z) + rows, e + 2 * C, factor, group, quarter, lane);
        }
        {
            const u64 dout = at(AT_DOUT), state = at(AT_STATE + group * Whole::PANEL);
            begin_read(x, dout, state);   // dO S
        }
        publish_shared();
        groups_barrier<256>(1);   // Z and Y are whole
        const float e0 = e[i0], e1 = e[i1];
        end_products<1>(y);
        scale_rows(y, -e0, -e1);
        {
            const u64 y_gram = at(AT_Y), k = panel_descriptor(opaque(keys) + group * Tokens::PANEL);
            begin_apply(y, y_gram, k);   // r
        }
        end_products<1>(x);
        warp_arrive(bar.state_free(), lane);
        if (LA_UNIT) {   // e0 and e1 are the keys'
            const float *sums = e + 2 * C, *queries = checkpoint + AT_QUERY / 4;
            scale_rows(x, a.scale * exp2_approx(fminf(sums[i0], 0.f)) * queries[i0],
                       a.scale * exp2_approx(fminf(sums[i1], 0.f)) * queries[i1]);
        } else scale_rows(x, a.scale * e0, a.scale * e1);
        {
            const u64 z_gram = at(AT_Z), k = panel_descriptor(opaque(keys) + group * Tokens::PANEL);
            begin_apply(x, z_gram, k);   // dq
        }
        end_products<1>(y);
        float erase_dots[2] = {0.f, 0.f}, written[4] = {};   // r.k; parts of dW.v
        if (group) {
            const float* parts =
                (const float*)(a.ends + (traversal.block + chunk) * ENDS + END) + (lane & 3) * 2 * C + i0;
#pragma unroll
            for (int i = 0; i < 4; i++) written[i] = parts[(i >> 1) * C + (i & 1) * 8];
        }
        row_dots(y, keys + group * Tokens::PANEL + rows, erase_dots);
        if (LA_DECAY) {
            dot[0] = 2.f * erase_dots[0];
            dot[1] = 2.f * erase_dots[1];
        }
        barrier_wait(bar.queries(), s);
        if (partial(chunk)) {
            clear_rows<128, 1>(shared + AT_Q + group * Tokens::PANEL, traversal.own(a, chunk), thread);
            publish_shared();
            group_barrier(group + 2);
        }
        barrier_wait(bar.written(), s);
        barrier_wait(bar.end(), s);
        {
            const u64 z_gram = at(AT_Z), y_gram = at(AT_Y), k = panel_descriptor(opaque(keys) + group * Tokens::PANEL),
                      q = at(AT_Q + group * Tokens::PANEL);
            accumulator_fence(y);
            products_begin();
#pragma unroll
            for (int d = 0; d < 4; d++)
                product_AtB(y, y_gram + Square::across(d), k + Tokens::across(d), true);   // Y^T K
#pragma unroll
            for (int d = 0; d < 4; d++)
                product_AtB(y, z_gram + Square::across(d), q + Tokens::across(d), true);   // Z^T Q
            const u64 written = at(AT_WRITTEN), end = at(AT_END + group * Whole::PANEL);
#pragma unroll
            for (int d = 0; d < 8; d++)
                product_AB(y, written + Tokens::along(d), end + Whole::across(d), true);   // d U dS
            products_commit();
        }
        erase_dots[0] += written[0] + written[2];
        erase_dots[1] += written[1] + written[3];
        quad_sums(erase_dots);
        if ((lane & 3) == 0) {
            float* to = (float*)(memory + AT_CHECKPOINTS + s * CHECKPOINT_SUMS + AT_DBETA_PARTS) + group * C;
            to[i0] = erase_dots[0];
            to[i1] = erase_dots[1];
        }
        end_products<!LA_UNIT>(x);
        if (LA_UNIT) {
            accumulator_fence(y);
            quad_sums(dot);
            barrier_wait(bar.end_done(), s);   // A has been read
            make_normal(
                x, y, dot,
                {shared + AT_Q + group * Tokens::PANEL + rows, keys + group * Tokens::PANEL + rows,
                 checkpoint + AT_QUERY / 4, e + 3 * C, (float2*)(memory + AT_CHECKPOINTS + s * CHECKPOINT_SUMS)},
                group, i0, lane);
        } else if (LA_DECAY) row_dots(x, shared + AT_Q + group * Tokens::PANEL + rows, dot);
        store_tile_rows(x, new_values + group * Tokens::PANEL + rows);
        publish_shared();
        group_barrier(group + 2);
        if (LA_STEPS > 1 || partial(chunk))
            store_own<LA_STEPS>(token_rows(a.out, traversal.sequence, traversal.head) + (i64)chunk * C * a.out.token,
                                a.out.token, new_values + group * Tokens::PANEL, 64 * group, LA_K,
                                min(C, traversal.sequence.T - chunk * C), thread);
        else if (leader) {
            box_out(a.dq, new_values + group * Tokens::PANEL, 64 * group, traversal.head, traversal.token(chunk),
                    traversal.row);
            out_commit();
        }
        __syncwarp();
        end_products<0>(y);
        if (LA_DECAY && !LA_UNIT) {
            float less[2] = {0.f, 0.f};
            row_dots(y, keys + group * Tokens::PANEL + rows, less);
            dot[0] -= less[0];
            dot[1] -= less[1];
            quad_sums(dot);
        }
        group_barrier(group + 2);   // q's panel has been read
        store_tile_rows(y, shared + AT_Q + group * Tokens::PANEL + rows);
        publish_shared();
        barrier_wait(bar.end_done(), s);
        if (LA_DECAY && (lane & 3) == 0) {
            dots[C * group + i0] = dot[0];
            dots[C * group + i1] = dot[1];
            if (group == 0) {
                const float* sums = e + 2 * C;
                dots[2 * C + i0] = i0 ? sums[i0] - sums[i0 - 1] : sums[0];
                dots[2 * C + i1] = sums[i1] - sums[i1 - 1];
            }
        }
        group_barrier(group + 2);
        if (leader) out_read();
        warp_arrive(bar.chunk_free(), lane);
        if (partial(chunk))
            store_own<1>(own_rows(a.other, traversal.sequence, traversal.head) + (i64)chunk * C * a.other.token,
                         a.other.token, shared + AT_Q + group * Tokens::PANEL, 64 * group, LA_K,
                         traversal.own(a, chunk), thread);
        else if (leader) {
            box_out(a.dk, shared + AT_Q + group * Tokens::PANEL, 64 * group, traversal.head, traversal.token(chunk),
                    traversal.row);
            out_commit();
        }
        __syncwarp();
    }
    if (leader) out_read();
}

extern "C" __global__ void __launch_bounds__(512, 1) grads(const __grid_constant__ DeltaArguments a) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const u32 shared = shared_address(memory);
    const DeltaTraversal traversal(a, blockIdx.x, a.segments, a.chunks);
    if (traversal.segment > traversal.last || traversal.steps <= 0) return;
    const GradBarriers bar = {shared + AT_BARRIERS};
    if (threadIdx.x == 0) bar.init();
    __syncthreads();
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x >> 5, 0), lane = threadIdx.x & 31;
    if (warp < 8) {
        claim_registers<160>();
        scan_states({a, traversal, memory, shared, bar, warp, lane});
    } else {
        release_registers<96>();
        gradients(a, traversal, memory, shared, bar, warp - 8, lane);
    }
}
