export PYTHONPATH=$PWD:$PWD/../site LINATTN_CACHE_DIR=/tmp/cc
mkdir -p $OUT
timeout 24 python -m bench portable_attention --backend cuda --results $OUT --no-peers --cases 0 1 3 7 9 6 5 2 4 8 --tiles 0 1 2 3 > $OUT/bench.log 2>&1; echo "bench rc $?"
(timeout 17 python -m pytest -p no:benchmark -q -n 14 --maxfail 25 --tb=short tests/softmax/test_cuda_portable.py -k "caches or cache or recorded" > $OUT/t1.log 2>&1; echo "portable rc $?" >> $OUT/t1.log)
grep -v Warn $OUT/bench.log | cut -c1-700 | tail -c 8000; tail -c 2500 $OUT/t1.log
